"""Every field of SamplingParams, right and wrong. A refusal names the field and fits on one line."""

from __future__ import annotations

import dataclasses
import math
from fractions import Fraction

import pytest

from pagedcli.core.sampling import MAX_LOGPROBS, MAX_N, SamplingParams
from pagedcli.errors import RequestError

INT_FIELDS = (
    "top_k", "seed", "n", "max_tokens", "min_tokens", "logprobs", "prompt_logprobs", "priority", "max_pages",
)  # fmt: skip
FLOAT_FIELDS = (
    "temperature", "top_p", "min_p", "repetition_penalty",
    "presence_penalty", "frequency_penalty", "deadline_s",
)  # fmt: skip
SWITCHES = ("include_stop_str_in_output", "ignore_eos", "echo", "skip_special_tokens")
TEXT_FIELDS = ("stop", "bad_words", "allowed_words")
ID_FIELDS = ("bad_token_ids", "stop_token_ids", "allowed_token_ids")


def refused(**values: object) -> RequestError:
    with pytest.raises(RequestError) as caught:
        SamplingParams(**values)  # type: ignore[arg-type]
    error = caught.value
    assert error.code == "invalid_value"
    assert error.status == 400
    assert "\n" not in str(error)
    assert len(str(error)) < 200
    return error


def test_every_field_is_in_one_of_these_lists() -> None:
    rest = {"logit_bias", "bad_word_ids", "cache_salt"}
    listed = {*INT_FIELDS, *FLOAT_FIELDS, *SWITCHES, *TEXT_FIELDS, *ID_FIELDS, *rest}
    assert {field.name for field in dataclasses.fields(SamplingParams)} == listed


def test_the_defaults_are_valid_and_greedy() -> None:
    params = SamplingParams()
    assert params.is_greedy
    assert (params.max_tokens, params.n, params.seed) == (256, 1, None)
    assert hash(params) == hash(SamplingParams())


@pytest.mark.parametrize("field", INT_FIELDS)
@pytest.mark.parametrize("value", ["5", 5.0, 1.5, True, [1], {}, math.nan, 10**30, -(10**30)])
def test_int_fields_refuse_what_is_no_int_in_range(field: str, value: object) -> None:
    error = refused(**{field: value})
    assert error.field == field
    assert field in str(error)


@pytest.mark.parametrize("field", FLOAT_FIELDS)
@pytest.mark.parametrize(
    "value", ["1", True, None, [1.0], math.nan, math.inf, -math.inf, 10**400, 1e10, -3.0, 1j]
)
def test_float_fields_refuse_what_is_no_finite_number_in_range(field: str, value: object) -> None:
    if field == "deadline_s" and value is None:
        assert SamplingParams(deadline_s=None).deadline_s is None
        return
    assert refused(**{field: value}).field == field


@pytest.mark.parametrize("field", SWITCHES)
@pytest.mark.parametrize("value", [1, 0, None, "true"])
def test_switches_refuse_what_is_no_bool(field: str, value: object) -> None:
    assert refused(**{field: value}).field == field


@pytest.mark.parametrize(
    ("field", "least", "greatest"),
    [
        ("top_k", -1, 2**31 - 1),
        ("seed", -(2**63), 2**64 - 1),
        ("n", 1, MAX_N),
        ("logprobs", 0, MAX_LOGPROBS),
        ("prompt_logprobs", 0, MAX_LOGPROBS),
        ("priority", -(2**31), 2**31 - 1),
        ("max_pages", 1, 2**31 - 1),
        ("max_tokens", 0, 2**31 - 1),
    ],
)
def test_int_ranges_end_where_they_say(field: str, least: int, greatest: int) -> None:
    assert getattr(SamplingParams(**{field: least}), field) == least
    assert getattr(SamplingParams(**{field: greatest}), field) == greatest
    message = str(refused(**{field: least - 1}))
    assert str(least) in message
    assert str(greatest) in message
    refused(**{field: greatest + 1})


@pytest.mark.parametrize(
    ("field", "good", "bad"),
    [
        ("temperature", (0, 0.0, 1e-300, 2, 100.0), (-1e-9, 100.1)),
        ("top_p", (1e-9, 0.5, 1), (0, 0.0, 1.0000001, -0.1)),
        ("min_p", (0, 0.5, 1), (-0.01, 1.01)),
        ("repetition_penalty", (0.01, 1, 1.3, 100), (0, -1, 101)),
        ("presence_penalty", (-2, 0, 2), (-2.01, 2.01)),
        ("frequency_penalty", (-2, 0, 2), (-2.01, 2.01)),
        ("deadline_s", (0.001, 60, None), (0, -1)),
    ],
)
def test_float_ranges(field: str, good: tuple[float, ...], bad: tuple[float, ...]) -> None:
    for value in good:
        stored = getattr(SamplingParams(**{field: value}), field)
        assert stored == value
        assert stored is None or type(stored) is float
    for value in bad:
        assert refused(**{field: value}).field == field


@pytest.mark.parametrize("field", ["seed", "max_tokens", "logprobs", "prompt_logprobs", "max_pages"])
def test_null_means_none_where_it_may(field: str) -> None:
    """A15: max_tokens null is the default of "as many as fit"."""
    assert getattr(SamplingParams(**{field: None}), field) is None


@pytest.mark.parametrize("field", ["top_k", "n", "min_tokens", "priority", *TEXT_FIELDS, "bad_token_ids"])
def test_null_is_refused_where_it_means_nothing(field: str) -> None:
    assert refused(**{field: None}).field == field


@pytest.mark.parametrize("value", [-1, "5", 2.0])
def test_A15_max_tokens(value: object) -> None:
    assert refused(max_tokens=value).field == "max_tokens"
    assert SamplingParams(max_tokens=0).max_tokens == 0


def test_min_tokens_beyond_max_tokens_names_both() -> None:
    message = str(refused(min_tokens=300))
    assert "300" in message
    assert "256" in message
    assert SamplingParams(min_tokens=300, max_tokens=None).min_tokens == 300
    assert SamplingParams(min_tokens=256).min_tokens == 256


@pytest.mark.parametrize("field", TEXT_FIELDS)
@pytest.mark.parametrize(
    "value", [[""], "", ["", "x"], ["x", ""], [1], 5, [None], {"x": 1}, b"x", ["\ud800"]]
)
def test_C1_texts_refuse_the_empty_one_and_what_is_no_text(field: str, value: object) -> None:
    assert refused(**{field: value}).field == field


@pytest.mark.parametrize("field", TEXT_FIELDS)
def test_one_text_stands_for_a_list_of_one(field: str) -> None:
    assert getattr(SamplingParams(**{field: "END"}), field) == ("END",)
    assert getattr(SamplingParams(**{field: ["a", "b"]}), field) == ("a", "b")


@pytest.mark.parametrize("field", ID_FIELDS)
@pytest.mark.parametrize("value", [[-1], ["5"], [1.0], [True], [2**31], 5, "5", [None], [[1]]])
def test_id_lists_refuse_what_is_no_token_id(field: str, value: object) -> None:
    assert refused(**{field: value}).field == field


def test_allowed_ids_must_leave_something() -> None:
    assert SamplingParams(allowed_token_ids=None).allowed_token_ids is None
    assert refused(allowed_token_ids=[]).field == "allowed_token_ids"
    assert refused(allowed_token_ids=[3, 4], bad_token_ids=[4, 3, 9]).field == "allowed_token_ids"
    assert SamplingParams(allowed_token_ids=[3, 4], bad_token_ids=[4]).allowed_token_ids == (3, 4)


@pytest.mark.parametrize("value", [[[]], [[1], []], [1], [[-1]], "x", None, [["a"]]])
def test_bad_word_ids(value: object) -> None:
    assert refused(bad_word_ids=value).field == "bad_word_ids"
    assert SamplingParams(bad_word_ids=[[1, 2], (3,)]).bad_word_ids == ((1, 2), (3,))


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ({"-1": 1}, "-1"),
        ({"abc": 1}, "abc"),
        ({"5": 1e9}, "5"),
        ({"5": math.nan}, "5"),
        ({"5": "1"}, "5"),
        ({"5": None}, "5"),
        ({"": 1}, "''"),
        ({"1.5": 1}, "1.5"),
        ({"²": 1}, "²"),
        ({"9" * 5000: 1}, "9999"),
        ({-1: 1}, "-1"),
        ({True: 1}, "True"),
        ({5: 100.5}, "100.5"),
        ([[5, 1], [5, 2]], "5"),
        ([5], "5"),
        ([[5, 1, 2]], "[5, 1, 2]"),
        (5, "5"),
        ("5", "5"),
        (None, "None"),
    ],
)
def test_A14_logit_bias_names_the_field_and_the_id(value: object, shown: str) -> None:
    error = refused(logit_bias=value)
    assert error.field == "logit_bias"
    assert shown in str(error)


def test_logit_bias_comes_out_as_sorted_pairs() -> None:
    assert SamplingParams(logit_bias={"7": 1, "3": -100}).logit_bias == ((3, -100.0), (7, 1.0))
    assert SamplingParams(logit_bias=[(7, 1), [3, 0.5]]).logit_bias == ((3, 0.5), (7, 1.0))
    # Beyond any vocabulary: the text layer knows the vocabulary and refuses it there.
    assert SamplingParams(logit_bias={"999999": 5}).logit_bias == ((999999, 5.0),)


def test_numbers_of_other_libraries_are_taken_as_what_they_are() -> None:
    class Five:
        def __index__(self) -> int:
            return 5

    class Broken:
        def __index__(self) -> int:
            raise TypeError("only integer scalars")

    params = SamplingParams(top_k=Five(), temperature=Fraction(1, 2))
    assert type(params.top_k) is int
    assert params.top_k == 5
    assert params.temperature == 0.5
    assert refused(top_k=Broken()).field == "top_k"


def test_samples_and_greedy_go_together() -> None:
    params = SamplingParams(n=4, temperature=0, top_k=1, top_p=0.1, min_p=0.1, seed=3)
    assert params.is_greedy
    assert SamplingParams(temperature=-0.0).is_greedy
    assert not SamplingParams(temperature=1e-300).is_greedy


def test_a_long_value_is_shown_shortened() -> None:
    assert len(str(refused(stop=["", "x" * 1000]))) < 150
    assert refused(cache_salt=5).field == "cache_salt"


def test_replace_checks_again() -> None:
    params = SamplingParams(temperature=0.7, stop=["x"])
    changed = params.replace(top_k=3, logit_bias={"4": 1})
    assert (changed.temperature, changed.stop, changed.top_k) == (0.7, ("x",), 3)
    assert changed.logit_bias == ((4, 1.0),)
    assert changed.replace() == changed
    with pytest.raises(RequestError, match="top_p is 2") as caught:
        params.replace(top_p=2)
    assert caught.value.field == "top_p"


def test_replace_refuses_unknown_fields_with_a_suggestion() -> None:
    with pytest.raises(RequestError, match="did you mean temperature") as caught:
        SamplingParams().replace(temprature=1)
    assert (caught.value.code, caught.value.field) == ("unknown_field", "temprature")
    with pytest.raises(RequestError, match="leave it out"):
        SamplingParams().replace(zzzz=1)


@pytest.mark.parametrize("field", ["seed", "max_tokens", "temperature", "top_k", "stop_token_ids"])
def test_a_number_of_thousands_of_digits_is_refused_like_any_other(field):
    value = 10**5000
    with pytest.raises(RequestError, match=rf"{field} is a number of very many digits: "):
        SamplingParams(**{field: [value] if field.endswith("ids") else value})
