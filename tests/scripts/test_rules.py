"""Tests of what is said of rules: the statistic, the table, the file, the picture."""

import pytest
from PIL import Image

from podracers import errors


@pytest.fixture(scope="module")
def rules(tools):
    return tools("results.rules").rules


@pytest.fixture
def found(rules):
    shares = {
        rules.RULE: [[0.0, 0.9], [0.1, 1.0], [0.0, 0.2]],
        rules.A2C: [[0.5, 1.0]] * 3,
        rules.BLIND: [[0.0, 0.5]] * 3,
        rules.RANDOM: [[0.0, -0.25]] * 3,
    }
    task = rules.Task("gin/some.gin", "small", 2.5, shares, (40.0, 0.01), [(40.0, 0.01, 1.0)])
    return rules.Judgement("--run_dir a b c", ["a", "b", "c"], 64, 2399, [task])


def test_rules_are_the_sample(rules, found):
    shares = found.tasks[0].shares[rules.RULE]
    estimate = rules.estimate(shares)
    assert estimate.value == 0.9 and estimate.interval == (0.2, 1.0)
    assert rules.estimate(shares, 0).value == 0.0
    assert rules.estimate(shares[:1]).interval is None


def test_a_table_says_what_was_reached_at_the_end(rules, found):
    line = rules.table(found).splitlines()[2]
    assert line == (
        "| `small` of `some` | 0.90 [0.20, 1.00] | 1.00 [1.00, 1.00] | 0.50 [0.50, 0.50] "
        "| -0.25 [-0.25, -0.25] | 40, 0.01 |"
    )
    assert "3 rule(s), 64 lifetimes" in rules.table(found)
    assert "`python scripts/evaluate_rule.py --run_dir a b c`" in rules.table(found)


def test_results_are_the_same_after_a_file(rules, found, tmp_path):
    path = tmp_path / "small.json"
    rules.write(found, path)
    again = rules.read(path)
    assert rules.table(again) == rules.table(found)
    assert again.tasks[0].shares == found.tasks[0].shares
    path.write_text('{"command": "x"}')
    with pytest.raises(errors.UserError, match="holds no results"):
        rules.read(path)


def test_curves_are_drawn(rules, found, tmp_path):
    rules.draw(found, tmp_path / "small.png")
    with Image.open(tmp_path / "small.png") as image:
        assert image.width > 200
