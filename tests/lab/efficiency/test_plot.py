from __future__ import annotations

from pathlib import Path

from blockattn_rag.lab.efficiency.plot import plot


def test_a_plot_names_the_paths_that_the_rows_hold(tmp_path: Path) -> None:
    rows = [
        {"length": length, "block_tokens": size, "full_s": 2.0 * length, "relay_s": 1.0 * size}
        for length in (512, 1024)
        for size in (128, 512)
    ]
    file = tmp_path / "plot.svg"
    plot(rows, file, x="length", unit="s", series="block_tokens")
    drawn = file.read_text("utf-8")
    assert "full prefill, 128 tokens of a block" in drawn
    assert "blocks, relay, 512 tokens of a block" in drawn
    assert "blocks, copied" not in drawn
    assert "tokens of context" in drawn
