from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))

from model_table import CHECKPOINTS, PAGE, Row, families, measure, measure_multimodal, page, share

ROOT = Path(__file__).parents[1]

# Popular families with shared, latent or state layers.
NAMED = {
    *("gemma3n_text", "gemma4_text", "deepseek_v2", "deepseek_v3", "glm4_moe_lite", "minicpm3"),
    *("longcat_flash", "youtu", "qwen3_5_text", "qwen3_5_moe_text", "qwen3_next", "olmo_hybrid"),
    *("kimi_linear", "lfm2", "lfm2_moe", "granitemoehybrid", "nemotron_h", "falcon_h1", "bamba"),
    *("jamba", "zamba2"),
}


@pytest.mark.parametrize(
    ("family", "how"),
    [
        ("llama", "relay"),
        ("gemma2", "relay"),
        ("codegen", "copy"),
        ("youtu", "latent"),
        ("granitemoehybrid", "hybrid"),
        ("bert", "refused"),
        ("glm_moe_dsa", "refused"),
        ("xmod", "not built"),
    ],
)
def test_a_family_is_measured(family: str, how: str) -> None:
    row = measure(family)
    assert row is not None
    assert (row.family, row.how) == (family, how)
    assert row.error <= 1e-4
    assert row.is_accepted == row.is_rotary or how == "refused"
    assert row.is_accepted == (how not in ("refused", "not built"))


def test_encoder_decoders_are_omitted() -> None:
    assert measure("bart") is None


def test_the_page_lists_every_promised_family_as_accepted() -> None:
    text = PAGE.read_text(encoding="utf-8")
    accepted = re.findall(r"^\| `([\w-]+)` \| (?:relay|copy|latent|hybrid) \|", text, re.MULTILINE)
    assert {*accepted} >= NAMED
    found = re.search(r"(\d+) of the (\d+) families", text)
    assert found is not None
    count, of = map(int, found.groups())
    assert count == len(accepted)
    assert count / of >= 0.9


def test_text_models_of_multimodal_families_are_separate_families() -> None:
    assert "gemma3_text" in families()
    assert "gemma3" not in families()


@pytest.mark.parametrize(
    ("family", "row"),
    [
        ("gemma3", ("Gemma3ForCausalLM", "5 windowed attention, 1 attention")),
        ("mistral4", ("Mistral4ForCausalLM", "3 latent attention")),
        ("qwen2_5_vl", ("", "2 attention")),
        ("llama4", None),
    ],
)
def test_a_multimodal_family_is_measured(family: str, row: tuple[str, str] | None) -> None:
    assert measure_multimodal(family) == row


def test_checkpoints_have_the_correct_bytes_per_token() -> None:
    bytes_of = {one.name: one.bytes_per_token for one in CHECKPOINTS}
    assert bytes_of["meta-llama/Llama-3.1-8B-Instruct"] == 128 * 1024
    assert bytes_of["deepseek-ai/DeepSeek-V3"] == 61 * 576 * 2
    assert len(bytes_of) == len(CHECKPOINTS) >= 25


def test_the_page_counts_and_groups_families() -> None:
    rows = [Row("a", "relay", "2 attention", 1e-6, True), Row("b", "refused", "ALiBi")]
    rows += [Row("c", "refused", "sparse", is_rotary=True), Row("d", "not built", "KeyError")]
    assert share(rows) == (1, 2)
    text = page(rows, {"e": ("EForCausalLM", "1 attention"), "f": ("", "3 state")})
    assert (
        "1 of the 2 families with rotary or no position\nencoding run in block mode (50 %)" in text
    )
    assert "| `a` | relay | 2 attention |" in text
    assert "| ALiBi | `b` |" in text
    assert "| `d` | `KeyError` |" in text
    assert "| `e` | `EForCausalLM` | 1 attention |\n| `f` | not separate | 3 state |" in text
