"""Devices of tests that run on a CPU and, by `make test-gpu`, on a GPU."""

import pytest
import torch

on_gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
GPU = pytest.param("cuda", marks=on_gpu)
DEVICES = ["cpu", GPU]
