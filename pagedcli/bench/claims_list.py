"""The claims made for engines with paged KV, and how each is tested here. Standard library and `bench` only.

Thresholds stand once: the constant that judges is the one that the text of the test tells.
"""

from __future__ import annotations

from pagedcli.bench.claims import Claim, Finding, Measurements, NotMeasured, Verdict, factor_finding, found
from pagedcli.bench.report.numbers import number, ratio, seconds, share

RATE, TPOT = "output_tokens_per_s", "tpot_s"
CONTIGUOUS, FIRST_FIT, PAGED = (f"modes/{name}, continuous" for name in ("contiguous", "first-fit", "paged"))
PAGED_STATIC = "modes/paged, static"
LOW_USE, HIGH_USE = 0.30, 0.95


def _kv_use(m: Measurements) -> Finding:
    reserved, fitted, paged = (m.middle(arm, "kv_use") for arm in (CONTIGUOUS, FIRST_FIT, PAGED))
    text = (
        f"longest sequence reserved: {share(reserved)}; prompt + max_tokens reserved: {share(fitted)}; "
        f"paged: {share(paged)}"
    )
    is_true = reserved <= LOW_USE and paged > HIGH_USE
    return found(is_true, text, contiguous=reserved, first_fit=fitted, paged=paged)


MOST_RESERVED_USE = 0.10


def _reserved(m: Measurements) -> Finding:
    use = m.middle("reserved/contiguous", "kv_use")
    return found(use < MOST_RESERVED_USE, f"{share(use)} over the run", kv_use=use)


CONCURRENCY = 4.0


def _concurrency(m: Measurements) -> Finding:
    paged, reserved, fitted = (m.middle(arm, "peak_running") for arm in (PAGED, CONTIGUOUS, FIRST_FIT))
    text = (
        f"{paged:.0f} at once paged, {reserved:.0f} with the longest sequence reserved "
        f"({ratio(paged / reserved)}), {fitted:.0f} with prompt + max_tokens reserved ({ratio(paged / fitted)})"
    )
    return found(paged >= CONCURRENCY * reserved, text, factor=paged / reserved, of_first_fit=paged / fitted)


LONGER = 1.5


def _context(m: Measurements) -> Finding:
    reserved, fitted, paged = (
        m.middle(f"context/{name}", "longest_tokens") for name in ("contiguous", "first-fit", "paged")
    )
    together = m.middle("context/paged", "peak_running")
    if m.middle("context/contiguous", "peak_running") != together:
        raise NotMeasured("the arms did not run equally many at once")
    text = (
        f"of {together:.0f} at once, one had {paged:,.0f} tokens paged, {reserved:,.0f} where each reserves "
        f"as much as the longest, {fitted:,.0f} where each reserves prompt + max_tokens"
    )
    return found(paged >= LONGER * reserved, text, factor=paged / reserved, of_first_fit=paged / fitted)


OVERHEAD = 1.02


def _overhead(m: Measurements) -> Finding:
    factor = m.over("pages/256", "pages/16", RATE)
    return factor_finding(
        factor, OVERHEAD, "one page for each sequence gives {} the output tokens/s of page 16"
    )


SWING = 1.1


def _swing(m: Measurements) -> Finding:
    small, large = m.middle("pages/8", "swing"), m.middle("pages/32", "swing")
    text = (
        f"slots held rise and fall by {share(small)} of their mean (standard deviation) with page 8, "
        f"{share(large)} with page 32"
    )
    if large / SWING < small < large * SWING:
        return Finding(Verdict.NO_DIFFERENCE, text, {"small": small, "large": large})
    return found(small >= large * SWING, text, small=small, large=large)


PAGE_GAIN = 1.02


def _page_gain(m: Measurements) -> Finding:
    return factor_finding(
        m.over("pages/32", "pages/8", RATE), PAGE_GAIN, "page 32 gives {} the output tokens/s of page 8"
    )


SCHEDULER_COST = 1.05


def _large_cost(m: Measurements) -> Finding:
    large, small = (m.middle(f"pages/{size}", "scheduler_s_per_step") * 1e6 for size in (256, 16))
    factor = m.over("pages/256", "pages/16", "scheduler_s_per_step")
    sentence = (
        f"the scheduler takes {number(large)} µs a step with page 256, {number(small)} µs with page 16: {{}}"
    )
    return factor_finding(factor, SCHEDULER_COST, sentence)


WASTE = 0.10


def _large_waste(m: Measurements) -> Finding:
    small, large = m.middle("pages/16", "kv_use"), m.middle("pages/256", "kv_use")
    text = f"KV use is {share(small)} with page 16, {share(large)} with page 256"
    return found(small - large >= WASTE, text, page_16=small, page_256=large)


BALANCE, PAGE_LOSS = 0.9, 0.97
BATCHES = (1, 2, 4, 8, 16, 32)
PAGES = (8, 16, 32, 256)


def _balance(m: Measurements) -> Finding:
    """Throughput per TPOT: it rises while requests share the reading of weights, and falls once they only queue."""
    scores = {
        size: m.middle(f"batch/{size}", RATE) / m.middle(f"batch/{size}", TPOT)
        for size in BATCHES
        if f"batch/{size}" in m.rounds
    }
    if 8 not in scores:
        return Finding(Verdict.NOT_MEASURED, "batch 8 was not run", {})
    best = max(scores, key=lambda size: scores[size])
    rates = {size: m.middle(f"pages/{size}", RATE) for size in PAGES if f"pages/{size}" in m.rounds}
    best_page = max(rates, key=lambda size: rates[size])
    faster = m.over(f"pages/{best_page}", "pages/16", RATE)
    of_best, of_page = scores[8] / scores[best], 1.0 / faster.middle
    text = (
        f"batch 8 has {share(of_best)} of the tokens/s per TPOT of the best batch ({best}); page 16 has "
        f"{share(of_page)} of the tokens/s of the fastest page size ({best_page})"
    )
    is_true = of_best >= BALANCE and (of_page >= PAGE_LOSS or faster.holds(1.0))
    return found(is_true, text, of_best_batch=of_best, of_best_page=of_page, best_batch=float(best))


LITTLE = 1.25


def _below_four(m: Measurements) -> Finding:
    two, four = m.over("batch/2", "batch/1", RATE), m.over("batch/4", "batch/1", RATE)
    text = (
        f"a batch of 2 gives {ratio(two.middle)} [{ratio(two.low)} to {ratio(two.high)}] the output tokens/s "
        "of one "
        f"request at a time, a batch of 4 {ratio(four.middle)}"
    )
    return found(two.middle < LITTLE, text, two=two.middle, four=four.middle)


TPOT_CUT = 1.05


def _tpot_cut(m: Measurements) -> Finding:
    factor = m.over(PAGED_STATIC, PAGED, TPOT)
    static, continuous = (m.middle(arm, TPOT) * 1e3 for arm in (PAGED_STATIC, PAGED))
    answers = m.over(PAGED_STATIC, PAGED, "e2e_s")
    sentence = (
        f"TPOT is {number(static)} ms static, {number(continuous)} ms continuous: {{}}; a whole answer takes "
        f"{ratio(answers.middle)} as long static"
    )
    return factor_finding(factor, TPOT_CUT, sentence)


WITHOUT_PAGING = 1.25


def _without_paging(m: Measurements) -> Finding:
    factor = m.over(PAGED, CONTIGUOUS, RATE)
    fitted = m.over(PAGED, FIRST_FIT, RATE)
    sentence = (
        "paged gives {} the output tokens/s of continuous batching with the longest sequence reserved, "
        f"{ratio(fitted.middle)} of that with prompt + max_tokens reserved"
    )
    return factor_finding(factor, WITHOUT_PAGING, sentence)


SLOWED, RELIEF = 1.5, 1.25
SHORT = "short_e2e_s"


def _long_slows(m: Measurements) -> Finding:
    factor = m.over("fairness/fcfs", "fairness/short only", SHORT)
    alone, beside = (m.middle(f"fairness/{arm}", SHORT) for arm in ("short only", "fcfs"))
    sentence = (
        f"the median short request takes {number(alone)} s among its like, {number(beside)} s beside "
        f"long ones: {{}}"
    )
    return factor_finding(factor, SLOWED, sentence)


def _policy_helps(m: Measurements) -> Finding:
    factor = m.over("fairness/fcfs", "fairness/shortest", SHORT)
    long_fcfs, long_shortest = (m.middle(f"fairness/{arm}", "long_e2e_s") for arm in ("fcfs", "shortest"))
    beside, helped = (m.middle(f"fairness/{arm}", SHORT) for arm in ("fcfs", "shortest"))
    sentence = (
        f"the median short request takes {number(beside)} s under fcfs, {number(helped)} s under shortest: "
        f"{{}} less; "
        f"the median long one {number(long_fcfs)} s and {number(long_shortest)} s"
    )
    return factor_finding(factor, RELIEF, sentence)


INT4_FASTER = 2.0
METHODS = ("awq", "gptq")


def _int4_faster(m: Measurements) -> Finding:
    """By the better of the methods that were run."""
    given = [name for name in METHODS if f"int4/{name}" in m.rounds] or ["awq"]
    factors = {name: m.over(f"int4/{name}", "int4/original", RATE) for name in given}
    batched = {name: m.over(f"modes/+ {name.upper()}", "modes/+ prefix sharing", RATE) for name in given}
    best = max(given, key=lambda name: factors[name].middle)
    others = "; ".join(
        f"{name.upper()} {ratio(factors[name].middle)} at one request, {ratio(batched[name].middle)} in the "
        "comparison above"
        for name in given
    )
    sentence = (
        f"one request at a time, {best.upper()} gives {{}} the output tokens/s of the original ({others})"
    )
    return factor_finding(factors[best], INT4_FASTER, sentence)


MOST_LOSS = 0.01


def _int4_loss(m: Measurements) -> Finding:
    given = [name for name in METHODS if f"{name}.perplexity_increase" in m.facts] or ["awq"]
    losses = {name: m.fact(f"{name}.perplexity_increase") for name in given}
    text = "; ".join(f"{name.upper()}: perplexity {value:+.1%}" for name, value in losses.items())
    return found(min(losses.values()) < MOST_LOSS, text, **losses)


HOUR_S = 3600.0


def _making(m: Measurements) -> Finding:
    awq, gptq = (m.fact(f"{name}.making_s") for name in METHODS)
    text = f"AWQ took {_duration(awq)}, GPTQ {_duration(gptq)}, of this model here, self-checks included"
    return found(awq < HOUR_S <= gptq, text, awq_s=awq, gptq_s=gptq)


SLIGHTLY = 1.01


def _duration(spent_s: float) -> str:
    return f"{number(spent_s / 60)} minutes" if spent_s >= 120 else seconds(spent_s)


def _awq_faster(m: Measurements) -> Finding:
    factor = m.over("int4/awq", "int4/gptq", RATE)
    return factor_finding(factor, SLIGHTLY, "AWQ gives {} the output tokens/s of GPTQ")


_SAME = "The same requests in the same memory, continuous batching."
_PAGES_TEST = "The same 8 requests at once, of 256 tokens at most, all of which fit."
CLAIMS = (
    Claim(
        "kv-use",
        "Paging raises KV use from 20-30% to over 95%.",
        f"{_SAME} KV use: tokens stored over token slots allocated to running requests, over the run. "
        "Confirmed if it is "
        f"{LOW_USE:.0%} at most where the longest sequence is reserved and over {HIGH_USE:.0%} paged.",
        _kv_use,
    ),
    Claim(
        "reserved",
        "Where 200 of 2,048 reserved tokens are used, KV use is under 10%.",
        "Requests of 150 prompt and 50 output tokens, 2,048 reserved for each. Confirmed under "
        f"{MOST_RESERVED_USE:.0%}.",
        _reserved,
    ),
    Claim(
        "concurrency",
        "Paging runs 4 times as many requests at once in the same memory.",
        f"{_SAME} Confirmed if at least {CONCURRENCY:g} times as many ran at once as with the longest "
        "sequence reserved.",
        _concurrency,
    ),
    Claim(
        "context",
        "Paging holds longer contexts in the same memory.",
        "One long request beside short ones, all running at once in the same memory, none preempted. "
        "Confirmed if the "
        f"long one can be {LONGER:g} times as long paged as where each reserves as much as the longest.",
        _context,
    ),
    Claim(
        "overhead",
        "Reading KV through page tables costs time at an equal batch.",
        f"{_PAGES_TEST} Page 256 is one page for each sequence. Confirmed if it is {OVERHEAD - 1:.0%} faster "
        "than page 16.",
        _overhead,
    ),
    Claim(
        "swing",
        "Memory in use swings more with small pages.",
        f"{_PAGES_TEST} Standard deviation over time of the token slots held, while half of the peak or more "
        "run. Confirmed "
        f"if page 8 has {SWING:g} times that of page 32; within that factor no difference is shown.",
        _swing,
    ),
    Claim(
        "page-gain",
        "Going from page 8 to page 32 brings throughput.",
        f"{_PAGES_TEST} Confirmed if page 32 is {PAGE_GAIN - 1:.0%} faster.",
        _page_gain,
    ),
    Claim(
        "large-pages-scheduler",
        "Very large pages cost the scheduler time.",
        f"{_PAGES_TEST} Confirmed if a step takes the scheduler {SCHEDULER_COST:g} times as long with page "
        "256 as with 16.",
        _large_cost,
    ),
    Claim(
        "large-pages-waste",
        "Very large pages waste memory.",
        f"{_PAGES_TEST} Confirmed if KV use with page 256 is {WASTE * 100:.0f} points under that with page 16.",
        _large_waste,
    ),
    Claim(
        "balance",
        "Page 16 and batch 8 are a good balance.",
        f"Confirmed if batch 8 has {BALANCE:.0%} of the best batch's output tokens/s per TPOT, and page 16 "
        f"{PAGE_LOSS:.0%} of the output tokens/s of the fastest page size at batch 8, or no difference from "
        "it is shown.",
        _balance,
    ),
    Claim(
        "small-batches",
        "Batches below 4 bring little.",
        f"Confirmed if a batch of 2 gives less than {LITTLE:g} times the output tokens/s of one request at a time.",
        _below_four,
    ),
    Claim(
        "tpot",
        "Continuous batching cuts the time per output token (TPOT).",
        f"The same requests, paged. Confirmed if mean TPOT is {TPOT_CUT:g} times as long under static batching.",
        _tpot_cut,
    ),
    Claim(
        "needs-paging",
        "Continuous batching suffers without paging.",
        f"{_SAME} Confirmed if paged gives {WITHOUT_PAGING:g} times the output tokens/s of reserving the "
        "longest sequence.",
        _without_paging,
    ),
    Claim(
        "long-slow-short",
        "Long requests slow short ones.",
        "Short requests with and without long ones before them, fcfs. Confirmed if the median short request "
        f"takes {SLOWED:g} "
        "times as long beside long ones.",
        _long_slows,
    ),
    Claim(
        "policy",
        "A length-aware policy (--policy shortest) gives short requests their speed back.",
        f"The same long and short requests. Confirmed if the median short one takes {RELIEF:g} times as long "
        "under fcfs.",
        _policy_helps,
    ),
    Claim(
        "int4-speed",
        "INT4 runs 2 to 3 times faster.",
        f"One request at a time. Confirmed if a 4-bit checkpoint gives {INT4_FASTER:g} times the output "
        "tokens/s of the "
        "original.",
        _int4_faster,
    ),
    Claim(
        "int4-loss",
        "INT4 loses less than 1%.",
        "Perplexity on held-out text, from the checkpoint's quality.json. Confirmed if one rises by less "
        f"than {MOST_LOSS:.0%}.",
        _int4_loss,
    ),
    Claim(
        "making",
        "AWQ is made in minutes where GPTQ takes hours.",
        "Both made here, with the same text. Confirmed if AWQ takes less than an hour and GPTQ an hour or more.",
        _making,
    ),
    Claim(
        "awq-speed",
        "AWQ runs slightly faster than GPTQ.",
        f"One request at a time. Confirmed if AWQ gives {SLIGHTLY:g} times the output tokens/s.",
        _awq_faster,
    ),
)
