"""Optional Triton kernels. Each has an implementation in torch that the tests compare it with."""
