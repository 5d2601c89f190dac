"""Run the Python code blocks of READMEs with the installed packages and the bundled model.

Usage: python .ci/run_readmes.py README.md ...

Each block runs in its own process and folder. Blocks that use SmolLM2 run with the bundled model,
so that nothing is downloaded. Whether the answers are correct is not checked.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path


def main(pages: list[str]) -> int:
    for page in pages:
        text = Path(page).read_text("utf-8")
        blocks = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
        if not blocks:
            print(f"{page} has no Python code")
            return 1
        for number, block in enumerate(blocks, 1):
            start = time.perf_counter()
            with tempfile.TemporaryDirectory() as folder:
                code = block.replace('"smollm2"', '"bundled"')
                done = subprocess.run([sys.executable, "-c", code], cwd=folder)
            print(f"{page}, block {number}: {time.perf_counter() - start:.1f} s", flush=True)
            if done.returncode:
                return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
