"""Optional Triton kernels. Each has an implementation in torch that the tests compare it with."""

from importlib.util import find_spec

HAS_TRITON = find_spec("triton") is not None
