"""Making quantized models: calibration, quantizers, quality report. Imports nothing heavy by itself."""
