"""Many runs: side by side, measured and compared."""
