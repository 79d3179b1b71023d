"""A stand-in for a model whose logits depend on exactly the token chain that the KV cache holds, and its oracle.

Every cell stores the token and the position that were computed into it. A row reads the cells of positions 0 to its
own through the block table, checks the positions, and its logits are a function of the tokens it read: a wrong table,
copy, slot or token anywhere changes what is sampled, or fails at once.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from pagedcli.core.plan import TokenLogprob
from pagedcli.core.request import Request
from pagedcli.core.sampling import SamplingParams
from pagedcli.models.spec import ModelSpec
from pagedcli.ops.batch import ForwardBatch, KVCache
from tests.cpu.sampler_helpers import brute_adjusted, brute_choice

VOCAB_SIZE = 37


def chain_spec(vocab_size: int = VOCAB_SIZE) -> ModelSpec:
    """Two layers with one key-value head of two elements: (token, position)."""
    return ModelSpec.from_config(
        {
            "architectures": ["LlamaForCausalLM"],
            "hidden_size": 2,
            "intermediate_size": 2,
            "num_hidden_layers": 2,
            "num_attention_heads": 1,
            "num_key_value_heads": 1,
            "head_dim": 2,
            "vocab_size": vocab_size,
            "max_position_embeddings": 4096,
            "rms_norm_eps": 1e-5,
            "hidden_act": "silu",
        }
    )


def chain_logits(tokens: Sequence[int], vocab_size: int = VOCAB_SIZE) -> torch.Tensor:
    """[vocab_size] float32, a pure function of the tokens. Halves only, so that there are ties."""
    seed = zlib.crc32(repr(list(tokens)).encode())
    noise = torch.randint(-6, 7, (vocab_size,), generator=torch.Generator().manual_seed(seed))
    return noise.float() / 2


@dataclass
class ChainModel:
    """See the module. `poison`: a chain that starts so gets NaN logits."""

    vocab_size: int = VOCAB_SIZE
    poison: tuple[int, ...] = (-1,)
    device: str = "cpu"

    def forward(self, batch: ForwardBatch, kv: KVCache) -> torch.Tensor:
        cells = torch.stack([batch.token_ids, batch.positions], dim=1).float()
        for layer in range(2):
            for sign, pool in ((1, kv.key(layer)), (-1, kv.value(layer))):
                blocks, offsets = batch.slot_mapping // kv.block_size, batch.slot_mapping % kv.block_size
                pool[blocks, 0, offsets] = sign * (layer + 1) * cells
        rows = [self._row(batch, kv, int(row)) for row in batch.logit_rows]
        return (
            torch.stack(rows).to(self.device) if rows else torch.empty(0, self.vocab_size, device=self.device)
        )

    def _row(self, batch: ForwardBatch, kv: KVCache, row: int) -> torch.Tensor:
        sequence = int((batch.query_start[1:] <= row).sum())
        count = int(batch.positions[row]) + 1
        assert count <= int(batch.seq_lens[sequence])
        table = batch.block_table[sequence].long()
        chains = []
        for layer in range(2):
            for sign, pool in ((1, kv.key(layer)), (-1, kv.value(layer))):
                cells = sign * pool[table, 0].flatten(0, 1)[:count] / (layer + 1)
                assert cells[:, 1].tolist() == list(range(count))
                chains.append(cells[:, 0].int().tolist())
        assert all(chain == chains[0] for chain in chains)
        if tuple(chains[0][: len(self.poison)]) == self.poison:
            return torch.full((self.vocab_size,), float("nan"))
        return chain_logits(chains[0], self.vocab_size)


def oracle(request: Request, count: int, vocab_size: int = VOCAB_SIZE) -> list[int]:
    """At most `count` output tokens of a request, alone and without a cache, by brute force."""
    tokens = list(request.tokens[: request.num_prompt])
    seed = (request.seed + 2**63) % 2**64 - 2**63
    stop_ids = sorted(request.stop_ids)
    while len(tokens) < request.num_prompt + count:
        logits = chain_logits(tokens, vocab_size).tolist()
        adjusted = brute_adjusted(logits, request.params, tokens, request.num_prompt, stop_ids)
        tokens.append(brute_choice(adjusted, request.params, seed, len(tokens), request.sample_index))
        if tokens[-1] in request.stop_ids and len(tokens) - request.num_prompt > request.params.min_tokens:
            break
    return tokens[request.num_prompt :]


def oracle_logprob(tokens: Sequence[int], token: int, num_top: int) -> TokenLogprob:
    """Of `token` after `tokens`, from torch's own log_softmax."""
    values = chain_logits(tokens).double().log_softmax(0).tolist()
    order = sorted(range(len(values)), key=lambda t: (-values[t], t))
    top = tuple((t, values[t]) for t in order[:num_top])
    return TokenLogprob(token, values[token], order.index(token) + 1, top)


def params_for(index: int) -> SamplingParams:
    """A different kind of sampling for each of a few requests in a row."""
    kinds: tuple[dict[str, object], ...] = (
        {},
        {"temperature": 1.0},
        {"temperature": 0.8, "top_k": 5, "logprobs": 2},
        {"temperature": 1.2, "top_p": 0.8, "frequency_penalty": 0.5, "presence_penalty": 0.5},
        {"repetition_penalty": 1.5, "bad_word_ids": [[3, 4], [5]], "logprobs": 0},
        {"temperature": 1.0, "min_p": 0.1, "min_tokens": 4, "logit_bias": {"7": 3.0}},
    )
    return SamplingParams().replace(**kinds[index % len(kinds)])
