"""What trainings cost and give on a GPU, from a folder that is copied there: `python -m benchmarks.gpu`.

The machine needs torch and CUDA; the folder, which `make gpu-bundle` fills, brings the rest. See docs/gpu.md.
"""
