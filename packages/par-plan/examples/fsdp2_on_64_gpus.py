"""Compare the ways to shard Llama 3 8B with FSDP2 on 64 GPUs of 80 GB. Runs in seconds and needs no GPU."""

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from par_groups import Topology
from par_plan import Machine, PretrainedShape, TrainingJob, predict

sizes = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "vocab_size": 128256}
config = LlamaConfig(**sizes, num_attention_heads=32, num_key_value_heads=8)  # or AutoConfig.from_pretrained(...)
with torch.device("meta"):  # no memory and no weights
    shape = PretrainedShape(AutoModelForCausalLM.from_config(config), context=8192)
gpus, machine = Topology.from_config({}, 64), Machine(memory=80e9, flops=989e12, devices_per_node=8)

print(f"{'':20}  fits  bytes per GPU  received per step      step")
modes = {0: "DDP", 1: "ZeRO stage 1", 2: "ZeRO stage 2", 3: "FSDP2 (ZeRO stage 3)"}
for zero, name in modes.items():
    step = predict(shape, gpus, TrainingJob(batch=64, zero=zero, precision="bf16", recompute="layers"), machine)
    memory, received = step.memory.total / 1e9, sum(step.traffic.values()) / 1e9
    fits = "yes" if step.fits(machine) else "no"
    print(f"{name:20}  {fits:>4}  {memory:10.1f} GB  {received:14.1f} GB  {step.seconds:6.2f} s")
