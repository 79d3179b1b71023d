"""Write a model of SmolLM2-135M's shape with random weights: for benchmarks on machines that reach no model.

python tools/random_model.py FOLDER
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SMOLLM2 = {
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "vocab_size": 49152,
    "max_position_embeddings": 8192,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "rope_theta": 100000.0,
    "tie_word_embeddings": True,
}


def main() -> int:
    """Write the folder named by the first argument."""
    if len(sys.argv) != 2:
        print("usage: python tools/random_model.py FOLDER", file=sys.stderr)
        return 2
    sys.path.insert(0, str(ROOT))
    from tests.fixtures_checkpoints import write_tiny_checkpoint

    write_tiny_checkpoint(Path(sys.argv[1]), "llama", dtype="bfloat16", **SMOLLM2)
    return 0


if __name__ == "__main__":
    sys.exit(main())
