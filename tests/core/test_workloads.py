"""Workloads are values: the same arguments give the same requests, within the ranges asked for."""

from __future__ import annotations

from pagedcli.workloads.requests import mixed_lengths, shared_prefix


def test_mixed_lengths_are_seeded_and_within_their_ranges() -> None:
    requests = mixed_lengths(200, seed=3, vocab_size=100, prompt_tokens=(5, 9), output_tokens=(2, 4))
    assert requests == mixed_lengths(200, seed=3, vocab_size=100, prompt_tokens=(5, 9), output_tokens=(2, 4))
    assert requests != mixed_lengths(200, seed=4, vocab_size=100, prompt_tokens=(5, 9), output_tokens=(2, 4))
    assert {len(r.prompt_token_ids) for r in requests} == {5, 6, 7, 8, 9}
    assert {r.output_tokens for r in requests} == {2, 3, 4}
    assert all(r.max_tokens == 4 and max(r.prompt_token_ids) < 100 for r in requests)
    assert len({r.id for r in requests}) == 200


def test_mixed_lengths_do_not_change_between_releases() -> None:
    request = mixed_lengths(1, seed=0, vocab_size=49152)[0]
    assert (len(request.prompt_token_ids), request.prompt_token_ids[:3], request.output_tokens) == (
        248,
        (25247, 27562, 2653),
        36,
    )


def test_shared_prefix_is_shared_and_no_more() -> None:
    requests = shared_prefix(20, seed=0, vocab_size=1000, prefix_tokens=30, prompt_tokens=(4, 8))
    assert len({r.prompt_token_ids[:30] for r in requests}) == 1
    assert len({r.prompt_token_ids[30:34] for r in requests}) == 20
