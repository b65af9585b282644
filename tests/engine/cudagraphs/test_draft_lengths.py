"""Draft lengths by number of running samples, as written in the settings."""

import pytest
from pydantic import ValidationError

from engine.cudagraphs.draft_lengths import DraftLengthTiers, default_tiers
from engine.cudagraphs.settings import GraphsSettings


def test_tier_holds_up_to_its_bound_and_the_last_one_beyond() -> None:
    lengths = DraftLengthTiers.parse("8:0,4,2 32:0,2 0")
    assert [lengths.at(samples) for samples in (1, 8, 9, 32, 33, 10**6)] == [
        (0, 2, 4),
        (0, 2, 4),
        (0, 2),
        (0, 2),
        (0,),
        (0,),
    ]
    assert lengths.query_lens == (1, 3, 5)
    assert list(lengths.samples(3, most=30)) == list(range(1, 31))
    assert list(lengths.samples(5, most=30)) == list(range(1, 9))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "must be written as"),
        ("8:0", "must be written as"),
        ("8:0, 2 0", "must be written as"),
        ("8:0 8:1 0", "must be increasing"),
        ("0:1 0", "must be increasing"),
        ("128", "at most 127 tokens"),
    ],
)
def test_unreadable_lengths_are_refused_with_the_settings(text: str, reason: str) -> None:
    with pytest.raises(ValidationError, match=reason):
        GraphsSettings(lengths=text)


def test_single_length_may_be_a_number_in_yaml() -> None:
    assert GraphsSettings.model_validate({"lengths": 3}).lengths == "3"


def test_drafter_uses_few_lengths_and_short_ones_for_many_samples() -> None:
    lengths = default_tiers(8)
    assert [lengths.at(samples) for samples in (1, 8, 9, 32, 33)] == [
        (0, 1, 2, 4, 8),
        (0, 1, 2, 4, 8),
        (0, 1, 2, 4),
        (0, 1, 2, 4),
        (0, 1, 2),
    ]
    assert default_tiers(3).query_lens == (1, 2, 3, 4)
    assert default_tiers(1).query_lens == (1, 2)
