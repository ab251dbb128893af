"""An emulator of compiled kernels and a model of their latency, for machines without a GPU."""
