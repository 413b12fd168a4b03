"""What is loaded once, before the processes of tests are forked."""

import gc

import pytest  # noqa: F401 - every fork imports the main module, which is pytest's
import torch._dynamo
import torch.distributed.tensor.debug
import torch.profiler  # noqa: F401

import tests.trainer.training  # noqa: F401

gc.freeze()  # a collection that looked at the imports would also copy every page of them
