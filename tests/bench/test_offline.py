"""Small runs of what the offline bench measures with."""

import json
import os
import sys
from pathlib import Path

import pytest
import torch

from bench.bars import verdict_rows
from bench.contender import ContenderFailed, ContenderProcess, Launch, slora_launch
from bench.contenders.answering import Run, Setup
from bench.engine_footprint import read_pss_bytes
from bench.floor import adapter_numbers, adapters_s, single_step_s
from bench.machine_rates import MachineRates, RateMeter
from bench.step_clock import REST, StepClock, Timed
from bench.step_profile import OVERHEAD, PARTS, Scene, profile_rows
from bench.stepped_engine import SteppedEngine
from bench.throughput import BASE, give_out
from bench.workload import write_adapter, write_model
from slora_kernels.ops import select_kernels
