"""RULER (Hsieh et al., 2024): 13 synthetic tasks of a chosen length. The tasks, their settings and the wording of their
prompts are those of NVIDIA/RULER (Apache-2.0); the programs are this project's own."""
