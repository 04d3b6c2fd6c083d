"""The two jobs: `train` takes steps and publishes versions, `generate` samples with the newest complete version."""

import json
import os
import time
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import AdamW

from par_checkpoint import Publisher, Receiver, Rendezvous, State
from par_groups import Vote
from par_train import CheckpointPolicy, LoggingPolicy, Run, Strategy

from .task import ANSWER, Samples, answer_logprobs, draw_prompts, read_vocabulary, rewards_of

QUEUE = 2  # batches that wait for the trainer; a longer queue makes samples older
PATIENCE = 20.0  # seconds that an update waits for a killed rank, and that other generators wait with it
STOP = -1


def open_store(address: str) -> Any:
    """Return a client of the store with the queue of batches. `Rendezvous` uses the same store under other keys."""
    host, _, port = address.rpartition(":")
    return dist.TCPStore(host, int(port), is_master=False, wait_for_workers=False)  # type: ignore[attr-defined]


def record(folder: Path, **event: Any) -> None:
    """Append an event with its time to the run's file, from which the curve is drawn."""
    with (folder / "events.jsonl").open("a") as file:
        file.write(json.dumps({"time": round(time.time(), 3), **event}) + "\n")


def train(options: Namespace) -> int:
    """Train on the batches of the generators, and publish a version after each step. Collective."""
    tensor = {"size": options.tensor, "mode": "1d"}
    vocabulary = read_vocabulary(options.model)
    with Strategy(parallel={"tensor": tensor}, zero=options.zero, clip_norm=1.0, device="cpu") as strategy:
        record(options.folder, who="trainer", rank=strategy.environment.rank, pid=os.getpid())
        store = open_store(options.at)
        store.set("vocabulary", vocabulary)
        model = strategy.from_pretrained(options.model, weights=False)
        optimizer = AdamW(model.parameters(), lr=options.lr, weight_decay=0.0)
        model, optimizer = strategy.initialize(model, optimizer)
        replica, replicas = strategy.groups.rank("data"), strategy.groups.size("data")
        run = Run(
            options.folder,
            strategy,
            resume="auto",
            checkpoint=CheckpointPolicy(every=options.save_every, keep_last=2),
            logging=LoggingPolicy(every=1),
        )
        with run, Publisher(Rendezvous(options.at), State(model=model), timeout=PATIENCE) as publisher:
            publisher.publish(run.step)
            for batch in run.steps(fresh_batches(run, store, options.lag), until=options.steps):
                rewards = rewards_of(batch.tokens, len(vocabulary) - 2)
                # Each replica trains on some of the groups. The tensor ranks of a replica take the same ones.
                advantages, tokens, logprobs = (
                    each.tensor_split(replicas)[replica].flatten(0, 1)
                    for each in (group_advantages(rewards), batch.tokens, batch.logprobs)
                )
                loss = policy_loss(answer_logprobs(model, tokens), logprobs, advantages, options.clip)
                strategy.backward(loss, optimizer)
                optimizer.step()
                optimizer.zero_grad()
                version = run.step + 1
                publisher.publish(version)  # returns after a copy, and generators fetch it during the next steps
                run.log(reward=rewards.mean(), lag=float(run.step - batch.version))
                if strategy.is_master:
                    reward = round(rewards.mean().item(), 4)
                    record(options.folder, who="trainer", version=version, trained_on=batch.version, reward=reward)
    return run.exit_code


def fresh_batches(run: Run, store: Any, lag: int) -> Iterator[Samples]:
    """Yield batches of the generators, identical on every rank. Collective."""
    while True:
        # One rank reads the queue, and all ranks need the batch: each replica trains on a part of it.
        received: list[Any] = [next_batch(run, store, lag) if run.strategy.is_master else None]
        dist.broadcast_object_list(received)
        yield received[0]


def next_batch(run: Run, store: Any, lag: int) -> Samples:
    """Wait for samples that are at most `lag` steps old."""
    while True:
        if store.check(["leave"]):
            run.leave()  # after this step, with a checkpoint
        if not store.queue_len("batches"):
            time.sleep(0.01)
            continue
        batch = Samples.from_bytes(store.queue_pop("batches"))
        # A later version than this step was published before the trainer resumed from an earlier step.
        if 0 <= run.step - batch.version <= lag:
            return batch


def group_advantages(rewards: Tensor) -> Tensor:
    """Return each reward minus the mean of its group, divided by the group's deviation, [prompts, samples]."""
    # The mean of a group replaces the value model of PPO: it is the reward that this prompt usually brings.
    centered = rewards - rewards.mean(1, keepdim=True)
    return centered / (rewards.std(1, keepdim=True) + 1e-4)


def policy_loss(logprobs: Tensor, sampled: Tensor, advantages: Tensor, clip: float) -> Tensor:
    """Return the clipped policy loss, a mean over digits.

    Args:
        logprobs: Log-probabilities under the weights that are trained, [rows, 2].
        sampled: Log-probabilities under the version that sampled, [rows, 2].
        advantages: Advantage of each row, [rows].
        clip: Largest distance of an importance ratio from 1 that still has a gradient.
    """
    # The ratio corrects for the steps since the version, and for its weights in bf16. The minimum removes the gradient
    # once the ratio has left the range in the direction in which the advantage pushes it.
    ratio, advantages = (logprobs - sampled).exp(), advantages[:, None]
    return -torch.minimum(ratio * advantages, ratio.clamp(1 - clip, 1 + clip) * advantages).mean()


def generate(options: Namespace) -> int:
    """Sample answers with the newest complete version until the trainer is done. Collective over the generator."""
    who, vocabulary = f"generator {options.number}", read_vocabulary(options.model)
    with Strategy(parallel={"tensor": {"size": options.generator_ranks, "mode": "1d"}}, device="cpu") as strategy:
        record(options.folder, who=who, rank=strategy.environment.rank, pid=os.getpid())
        store, vote = open_store(options.at), Vote(strategy.device)
        trained = store.get("vocabulary").decode()  # waits until the trainer has set it
        if vocabulary != trained:
            raise ValueError(
                f"model={options.model}: its vocabulary is {vocabulary!r}, and the trainer's {trained!r}; pass a copy "
                "of the trainer's folder model"
            )
        model = strategy.initialize(strategy.from_pretrained(options.model, weights=False))
        with Receiver(Rendezvous(options.at), State(model=model), timeout=PATIENCE) as receiver:
            # The first rank decides for all ranks: 0 to wait, or the number of a turn, which no generator has twice.
            while (turn := vote.cast(next_turn(store, receiver) if strategy.is_master else STOP)) != STOP:
                staged = receiver.poll()
                if staged is not None:
                    staged.apply()  # between two batches, so a batch has one version
                    if strategy.is_master:
                        record(options.folder, who=who, version=staged.version, received=staged.received)
                if turn == 0 or receiver.version is None:
                    time.sleep(0.01)
                    continue
                prompts = draw_prompts(options.prompts, len(vocabulary) - 2, turn)
                rows = prompts.repeat_interleave(options.samples, 0)
                tokens = strategy.sample(model, rows, ANSWER, temperature=1.0, seed=turn, ends=None)
                with torch.no_grad():
                    logprobs = answer_logprobs(model, tokens)
                if strategy.is_master:
                    tokens, logprobs = (each.unflatten(0, (-1, options.samples)) for each in (tokens, logprobs))
                    batch = Samples(version=receiver.version, tokens=tokens, logprobs=logprobs)
                    store.queue_push("batches", batch.to_bytes())
    return 0


def next_turn(store: Any, receiver: Receiver) -> int:
    """Return what the generator does next: the number of a batch, 0 to wait, or `STOP`."""
    if store.check(["done"]):
        return STOP
    if receiver.version is None or store.queue_len("batches") >= QUEUE:
        return 0
    return int(store.add("turns", 1))
