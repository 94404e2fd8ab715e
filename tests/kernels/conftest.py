"""Triton kernels run natively where there is a GPU, and in Triton's interpreter everywhere else.

Triton reads the switch when a kernel is defined, so it must be set before anything imports triton.
"""

import os
import sys

import pytest
import torch

if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
    assert "triton" not in sys.modules, "triton was imported before TRITON_INTERPRET=1 could be set"
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(scope="session")
def gpu() -> str:
    """The device on which Triton kernels run here."""
    return "cuda" if torch.cuda.is_available() else "cpu"
