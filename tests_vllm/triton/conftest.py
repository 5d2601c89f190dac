"""Tests of the Triton kernels in Triton's interpreter on the CPU (``make test-vllm``).

They are in this folder because vLLM installs Triton. They need a separate process, because Triton
reads ``TRITON_INTERPRET`` when it is imported.
"""

from __future__ import annotations

import os

collect_ignore_glob = [] if os.environ.get("TRITON_INTERPRET") == "1" else ["test_*.py"]
