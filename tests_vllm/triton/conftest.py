"""Tests of the Triton kernels, run by Triton's interpreter on the CPU (``make test-vllm``).

They are here, because vLLM installs Triton. Triton reads ``TRITON_INTERPRET`` when it is imported,
so that these tests need a process of their own.
"""

from __future__ import annotations

import os

collect_ignore_glob = [] if os.environ.get("TRITON_INTERPRET") == "1" else ["test_*.py"]
