"""Optimizers of public packages and their update scopes. Data only.

A class is listed under its package. It counts wherever in the package it is defined, since releases move classes
between modules. A longer name of a module goes before a shorter one. No package here needs to be installed.
"""

from collections.abc import Mapping
from enum import Enum


class UpdateScope(Enum):
    """Tensors that the update of one element depends on."""

    ELEMENT = "element"
    """The element, its gradient and its state only: any slice of a tensor can be updated by itself."""

    TENSOR = "tensor"
    """The tensor of the element: its shape, a norm, rows and columns, or state in blocks, as 8-bit state is."""

    MODEL = "model"
    """All tensors, such as one norm of all gradients or one step size; or it exchanges tensors with other ranks."""

    UNKNOWN = "unknown"
    """The class is not listed here."""


KNOWN: Mapping[str, Mapping[UpdateScope, str]] = {
    "torch.optim": {
        UpdateScope.ELEMENT: "Adadelta Adagrad Adam AdamW Adamax ASGD NAdam RAdam RMSprop Rprop SGD",
        UpdateScope.TENSOR: "Adafactor Muon",
        UpdateScope.MODEL: "LBFGS",
    },
    "adam_mini": {UpdateScope.MODEL: "Adam_mini"},  # it sums over ranks
    "apex.optimizers": {
        UpdateScope.ELEMENT: "FusedAdagrad FusedAdam FusedSGD",
        UpdateScope.TENSOR: "FusedNovoGrad",
        UpdateScope.MODEL: "FusedLAMB FusedMixedPrecisionLamb",  # max_grad_norm
    },
    "bitsandbytes.optim": {  # state in blocks from 4,096 elements on, percentile_clipping, max_unorm
        UpdateScope.TENSOR: "Adagrad Adagrad8bit Adagrad32bit Adam Adam8bit Adam32bit PagedAdam PagedAdam8bit "
        "PagedAdam32bit AdamW AdamW8bit AdamW32bit PagedAdamW PagedAdamW8bit PagedAdamW32bit AdEMAMix AdEMAMix8bit "
        "AdEMAMix32bit PagedAdEMAMix PagedAdEMAMix8bit PagedAdEMAMix32bit LAMB LAMB8bit LAMB32bit LARS LARS8bit "
        "LARS32bit Lion Lion8bit Lion32bit PagedLion PagedLion8bit PagedLion32bit RMSprop RMSprop8bit RMSprop32bit SGD "
        "SGD8bit SGD32bit",
    },
    "came_pytorch": {UpdateScope.TENSOR: "CAME"},
    "dadaptation": {
        UpdateScope.MODEL: "DAdaptAdaGrad DAdaptAdam DAdaptAdan DAdaptLion DAdaptSGD DAdaptAdamPreprint DAdaptAdanIP",
    },
    "deepspeed.ops": {
        UpdateScope.ELEMENT: "DeepSpeedCPUAdagrad DeepSpeedCPUAdam DeepSpeedCPULion FusedAdam FusedLion",
        UpdateScope.TENSOR: "FusedLamb",
    },
    "galore_torch": {UpdateScope.TENSOR: "AdamW AdamW8bit Adafactor GaLoreAdamW GaLoreAdamW8bit GaLoreAdafactor"},
    "lion_pytorch": {UpdateScope.ELEMENT: "Lion"},
    "lion_pytorch.cautious_lion": {UpdateScope.TENSOR: "Lion"},  # the mean of a mask
    "muon": {
        UpdateScope.TENSOR: "SingleDeviceMuon SingleDeviceMuonWithAuxAdam",
        UpdateScope.MODEL: "Muon MuonWithAuxAdam",  # these gather over ranks
    },
    "prodigyopt": {UpdateScope.MODEL: "Prodigy ProdigyReference"},
    "pytorch_optimizer": {
        UpdateScope.ELEMENT: "AdaBelief ADOPT AdEMAMix Adan LaProp Lion QHAdam QHM ScheduleFreeAdamW ScheduleFreeSGD "
        "SGDW SignSGD",
        UpdateScope.TENSOR: "AdaFactor Adalite AdamP SGDP APOLLO CAME Fira FlashAdamW Fromage GaLore Lamb LARS "
        "NovoGrad StableAdamW SCION SCIONLight RACS",
        UpdateScope.MODEL: "Adai AdaGC AvaGrad DAdaptAdaGrad DAdaptAdam DAdaptAdan DAdaptLion DAdaptSGD Prodigy",
    },
    "schedulefree": {
        UpdateScope.ELEMENT: "AdamWScheduleFree AdamWScheduleFreePaper AdamWScheduleFreeReference RAdamScheduleFree "
        "SGDScheduleFree SGDScheduleFreeReference",
    },
    "timm.optim": {
        UpdateScope.ELEMENT: "AdaBelief AdamWLegacy Adan Adopt LaProp Lion MADGRAD NAdamLegacy NAdamW RAdamLegacy "
        "RMSpropTF SGDW",
        UpdateScope.TENSOR: "Adafactor AdafactorBigVision AdamP Kron Lars Mars Muon NvNovoGrad SGDP",
        UpdateScope.MODEL: "Lamb LambLegacy",  # max_grad_norm
    },
    "torchao.optim": {UpdateScope.TENSOR: "Adam4bit Adam8bit AdamFp8 AdamW4bit AdamW8bit AdamWFp8 _AdamW"},
    "transformers.optimization": {UpdateScope.ELEMENT: "AdamW", UpdateScope.TENSOR: "Adafactor"},
}
"""Names of classes by package and update scope."""

WIDER: Mapping[str, Mapping[str, UpdateScope]] = {
    "pytorch_optimizer": {
        "adanorm": UpdateScope.TENSOR,
        "cautious": UpdateScope.TENSOR,
        "stable_adamw": UpdateScope.TENSOR,
        "use_gc": UpdateScope.TENSOR,
        "max_grad_norm": UpdateScope.MODEL,
    },
    "timm.optim": {"caution": UpdateScope.TENSOR},
}
"""Settings of a param group that widen the scope of a class when they are set, by package."""
