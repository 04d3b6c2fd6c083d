"""Records the trace that docs/images/profile.svg is drawn from: two ranks of a pipeline, one step, 1F1B.

Run as `python tools/profile_example.py`; writes docs/images/profile.json with what the picture shows of trace.json.
"""

import json
import sys
import tempfile
from pathlib import Path

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parent / "bench"))

RANKS, WIDTH, ROWS, MICROBATCHES, STEP = 2, 768, 1024, 4, 6
TARGET = Path(__file__).parents[1] / "docs" / "images" / "profile.json"


def main() -> None:
    """Trains on two ranks and keeps what is drawn."""
    from _ranks import spawned  # noqa: PLC0415 - it lies beside the benchmarks

    TARGET.write_text(json.dumps(spawned(RANKS, record), indent=0) + "\n", encoding="utf-8")


def record() -> list[dict[str, object]]:
    """The events of one step, in microseconds from its first one. On a rank."""
    from par_train import LoggingPolicy, MonitoringPolicy, Run, Strategy  # noqa: PLC0415 - in the ranks alone

    strategy = Strategy(parallel={"pipeline": RANKS}, pipeline={"microbatches": MICROBATCHES}, device="cpu")
    layers = [layer for _ in range(4) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]
    model = strategy.build(layers)
    model, optimizer = strategy.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1))[:2]
    batches = [(torch.ones(ROWS, WIDTH), torch.zeros(ROWS, WIDTH))]
    with tempfile.TemporaryDirectory() as folder:
        shared = [folder]
        torch.distributed.broadcast_object_list(shared, 0)
        with Run(
            Path(shared[0]) / "run",
            strategy,
            logging=LoggingPolicy(progress=False),
            monitoring=MonitoringPolicy(profile=f"steps={STEP}:{STEP + 1}"),
        ) as run:
            for batch in run.steps(batches, STEP + 2):
                strategy.execute_pipeline(iter([batch]), model, nn.functional.mse_loss, optimizer)
                optimizer.step()
                optimizer.zero_grad()
        torch.distributed.barrier()
        events = json.loads((Path(shared[0]) / "run" / "trace.json").read_text(encoding="utf-8"))["traceEvents"]
        torch.distributed.barrier()
    shown = [event for event in events if event.get("cat") == "pipeline"]
    began = min(event["ts"] for event in shown)
    return [
        {
            "rank": event["pid"],
            "name": event["name"],
            "start": round(event["ts"] - began, 1),
            "length": round(event["dur"], 1),
        }
        for event in sorted(shown, key=lambda event: (event["pid"], event["ts"]))
    ]


if __name__ == "__main__":
    main()
