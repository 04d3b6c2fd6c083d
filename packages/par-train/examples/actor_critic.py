"""Two models with different parallelism in one process: an actor cut over tensor ranks, a critic under ZeRO.

    python actor_critic.py runs/counting
    torchrun --nproc-per-node 2 actor_critic.py runs/counting --tensor 2
    torchrun --nproc-per-node 8 actor_critic.py runs/counting --tensor 4 --zero 3

`python -m par_train.examples.grpo` has generators in processes of their own. Here each model has a strategy of its own,
and neither knows of the other: nothing is global. The actor goes on from a prompt of numbers, and is rewarded for each
number that is one more than the last; the critic learns what reward a prompt will bring. Policy gradient with a
baseline, Sutton and Barto 2018, chapter 13.
"""

import argparse
import sys
from itertools import count

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss, scaled_dot_product_attention
from torch.optim import AdamW

from par_train import Run, Strategy

NUMBERS, PROMPT, ANSWER = 16, 2, 6


class Attention(nn.Module):
    """Causal attention; its heads are as many as its projections give, so it may be cut over ranks."""

    def __init__(self, width: int, head: int = 16) -> None:
        super().__init__()
        self.head = head
        self.query, self.key, self.value, self.output = (nn.Linear(width, width) for _ in range(4))

    def forward(self, hidden: Tensor) -> Tensor:
        """[batch, time, width] to the same."""
        heads = (
            project(hidden).unflatten(-1, (-1, self.head)).transpose(1, 2)
            for project in (self.query, self.key, self.value)
        )
        mixed: Tensor = self.output(scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).flatten(2))
        return mixed


class MLP(nn.Module):
    """Two linears and what is between them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, hidden: Tensor) -> Tensor:
        """[batch, time, width] to the same."""
        changed: Tensor = self.down(nn.functional.gelu(self.up(hidden)))
        return changed


class Decoder(nn.Module):
    """A small decoder in plain torch, of which the actor and the critic are made.

    Args:
        outputs: Features that come out for each number of the text.
        width: Features of the residual stream.
        depth: Number of blocks.
    """

    def __init__(self, outputs: int, width: int = 64, depth: int = 2) -> None:
        super().__init__()
        self.numbers = nn.Embedding(NUMBERS, width)
        self.places = nn.Parameter(0.02 * torch.randn(PROMPT + ANSWER, width))
        self.attentions = nn.ModuleList(Attention(width) for _ in range(depth))
        self.mlps = nn.ModuleList(MLP(width) for _ in range(depth))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2 * depth))
        self.head = nn.Linear(width, outputs)

    def forward(self, text: Tensor) -> Tensor:
        """Numbers int64 [batch, time] to [batch, time, outputs]."""
        hidden = self.numbers(text) + self.places[: text.shape[1]]
        for place, (attention, mlp) in enumerate(zip(self.attentions, self.mlps, strict=True)):
            hidden = hidden + attention(self.norms[2 * place](hidden))
            hidden = hidden + mlp(self.norms[2 * place + 1](hidden))
        found: Tensor = self.head(hidden)
        return found


CUT = {
    "attentions.*.query": "colwise",
    "attentions.*.key": "colwise",
    "attentions.*.value": "colwise",
    "attentions.*.output": "rowwise",
    "mlps.*.up": "colwise",
    "mlps.*.down": "rowwise",
}
"""How the actor is cut over tensor ranks."""


@torch.no_grad()
def answers(actor: nn.Module, prompts: Tensor, draws: Tensor) -> Tensor:
    """Prompts [batch, PROMPT] and what the actor says behind them, [batch, PROMPT + ANSWER].

    Each number is drawn by one of `draws`, uniform in 0 to 1, [batch, ANSWER], which are the same on all ranks of a
    tensor group.
    """
    text = prompts
    for draw in draws.unbind(1):
        chances = actor(text)[:, -1].double().softmax(-1).cumsum(-1)
        number = (chances < draw[:, None]).sum(-1, keepdim=True).clamp(max=NUMBERS - 1)
        text = torch.cat([text, number], 1)
    return text


def main(arguments: list[str] | None = None) -> int:
    """Trains, and returns the exit code of the process."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", help="folder of the run")
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--batch-size", type=int, default=64, help="prompts a step, over all ranks")
    parser.add_argument("--tensor", type=int, default=1, help="ranks that share each layer of the actor")
    parser.add_argument("--zero", type=int, default=1, help="what the ranks share of the critic")
    parser.add_argument("--device", default="auto")
    options = parser.parse_args(arguments)

    tensor = {"size": options.tensor, "mode": "1d"}
    with (
        Strategy(parallel={"tensor": tensor}, clip_norm=1.0, device=options.device) as for_actor,
        Strategy(zero=options.zero, clip_norm=1.0, device=options.device) as for_critic,
    ):
        torch.manual_seed(0)
        actor, critic = Decoder(NUMBERS), Decoder(1)
        actor_optimizer = AdamW(actor.parameters(), lr=3e-3)
        critic_optimizer = AdamW(critic.parameters(), lr=3e-3)
        plans = {actor: CUT} if options.tensor > 1 else None
        actor, actor_optimizer = for_actor.initialize(actor, actor_optimizer, plans=plans)
        critic, critic_optimizer = for_critic.initialize(critic, critic_optimizer)
        device, ranks = for_critic.device, for_critic.groups.size("data")  # of the critic all ranks are data ranks
        share = options.batch_size // ranks
        part = share * options.tensor  # prompts of a tensor group of the actor's
        first = for_critic.groups.rank("data") * share % part
        with Run(options.folder, for_actor, overwrite=True) as run:
            for _ in run.steps(count(), until=options.steps):
                # All ranks draw for the whole batch, so that who has which part of it changes nothing.
                generator, replica = torch.Generator().manual_seed(run.step), for_actor.groups.rank("data")
                every = torch.randint(NUMBERS, (options.batch_size, PROMPT), generator=generator)
                draws = torch.rand(options.batch_size, ANSWER, generator=generator, dtype=torch.float64)
                prompts = every[replica * part :][:part].to(device)
                text = answers(actor, prompts, draws[replica * part :][:part].to(device))
                said = text[:, PROMPT:]
                reward = (said == (text[:, PROMPT - 1 : -1] + 1) % NUMBERS).float().mean(1)

                # Each rank's critic looks at its share of the prompts of its tensor group; all ranks hear all values.
                value = critic(prompts[first : first + share])[:, -1, 0]
                loss = mse_loss(value, reward[first : first + share])
                for_critic.backward(loss, critic_optimizer)
                critic_optimizer.step()
                critic_optimizer.zero_grad()
                values = torch.empty(ranks, share, device=device)
                # One column of the critic's output is strided, and NCCL sends only contiguous tensors.
                dist.all_gather(list(values), value.detach().contiguous(), group=for_critic.groups["data"])
                baseline = values.view(-1, part)[replica]

                logits = actor(text[:, :-1])[:, PROMPT - 1 :]
                surprise = cross_entropy(logits.flatten(0, 1), said.flatten(), reduction="none").view_as(said).mean(1)
                for_actor.backward(((reward - baseline) * surprise).mean(), actor_optimizer)
                actor_optimizer.step()
                actor_optimizer.zero_grad()
                run.log(reward=reward.mean(), critic=loss)
        return run.exit_code


if __name__ == "__main__":
    sys.exit(main())
