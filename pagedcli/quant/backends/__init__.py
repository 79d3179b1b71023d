"""Other packages' quantizers, each in an environment of its own, behind the same command, report and checks."""
