"""What the Triton backends of the ops have in common.

Triton is imported where kernels are defined and where they are looked into, never by importing `sdm`: an op declares
its backend with `TritonBackend` and imports its kernels when it is first called.

- `backend.py`: whether Triton is there and new enough, and which calls a Triton backend takes.
- `launch.py`: the one function through which every kernel is launched, so that launches can be recorded.
- `interpreter.py`: Triton's interpreter, quicker and quieter, and the bytes that kernels load and store, counted by it.
- `ahead_of_time.py`: recorded launches compiled for GPUs that are not here. `benchmarks/ptx` runs them in an emulator.
"""
