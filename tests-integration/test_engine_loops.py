"""The training loops of an engine as they are usually written down, with a transformers model, run as they stand."""

from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import AdamW
from torch.optim.lr_scheduler import LinearLR
from torch.utils.data import DataLoader, TensorDataset

from par_train import Strategy

transformers = pytest.importorskip("transformers")
GPT2Config, GPT2LMHeadModel = transformers.GPT2Config, transformers.GPT2LMHeadModel  # loaded once for all ranks

MAX_EPOCHS = 2


def GPT2():
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=61, n_positions=16, n_embd=24, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
    config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.0  # random numbers differ between 1 and 2 ranks
    return GPT2LMHeadModel(config)


class GPTLMLoss(nn.Module):
    def forward(self, logits, input_ids):
        return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), input_ids[:, 1:].flatten())


def tokens(count=16):
    return torch.randint(0, 61, (count, 12), generator=torch.Generator().manual_seed(1))


def Dataset():
    return TensorDataset(tokens(), torch.ones(16, 12, dtype=torch.long))


def run_single_model(strategy):
    """Without a pipeline."""
    losses = []
    model = GPT2()
    optimizer = AdamW(model.parameters())
    dataloader = DataLoader(Dataset(), batch_size=8)
    lr_scheduler = LinearLR(optimizer)
    criterion = GPTLMLoss()
    model, optimizer, lr_scheduler, dataloader = strategy.initialize(model, optimizer, lr_scheduler, dataloader)
    for _epoch in range(MAX_EPOCHS):
        for input_ids, attention_mask in dataloader:
            outputs = model(input_ids, attention_mask=attention_mask)
            loss = criterion(outputs.logits, input_ids)
            strategy.backward(loss, optimizer)
            optimizer.step()
            lr_scheduler.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
    return model, optimizer, torch.stack(losses)


def run_plain():
    losses = []
    model, criterion = GPT2(), GPTLMLoss()
    optimizer = AdamW(model.parameters())
    lr_scheduler = LinearLR(optimizer)
    for _epoch in range(MAX_EPOCHS):
        for input_ids, _ in DataLoader(Dataset(), batch_size=8):
            loss = criterion(model(input_ids).logits, input_ids)
            loss.backward()
            optimizer.step()
            lr_scheduler.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
    return torch.stack(losses)


@pytest.mark.ranks(2, timeout=120)
@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 1e-5), ("fp16", 5e-3)])
def test_a_single_model_without_a_pipeline(precision, tolerance):
    """fp32: sums over two ranks in another order; fp16: the loss is the mean of hundreds of roundings to 11 bits."""
    with Strategy(precision=precision, zero=3) as strategy:
        _, _, losses = run_single_model(strategy)
        dist.all_reduce(losses)
        torch.testing.assert_close(losses / 2, run_plain(), rtol=tolerance, atol=0)


@pytest.mark.ranks(2, timeout=120)
def test_generation_and_files_of_both_plans(tmp_path):
    with Strategy(zero=1) as strategy:
        model, optimizer, _ = run_single_model(strategy)
        input_ids = tokens(2)[:, :4]
        sequences = model.generate(
            input_ids, max_new_tokens=4, do_sample=False, attention_mask=torch.ones_like(input_ids)
        )
        assert sequences.shape == (2, 8)
        kept = [each.clone() for each in model.parameters()]

        strategy.save(model, tmp_path / "model.pt", plan="torch")
        strategy.save(optimizer, tmp_path / "optimizer.pt", plan="torch")
        strategy.save(model, tmp_path / "checkpoint" / "gpt2", max_file_size_gb=10, plan="huggingface")
        strategy.save(optimizer, tmp_path / "checkpoint" / "gpt2", plan="huggingface")
        moments = [{slot: value.clone() for slot, value in each.items()} for each in optimizer.state.values()]
        for plan, of_model, of_optimizer in (
            ("torch", "model.pt", "optimizer.pt"),
            ("huggingface", "checkpoint/gpt2", "checkpoint/gpt2"),
        ):
            with torch.no_grad():
                for each in model.parameters():
                    each.zero_()
                for each in optimizer.state.values():
                    each["exp_avg"].zero_()
            strategy.load(model, tmp_path / of_model, plan=plan)
            strategy.load(optimizer, tmp_path / of_optimizer, plan=plan)
            assert all(torch.equal(*each) for each in zip(kept, model.parameters(), strict=True))
            for was, now in zip(moments, optimizer.state.values(), strict=True):
                assert all(torch.equal(was[slot], now[slot]) for slot in was)


@pytest.mark.ranks(2, timeout=120)
def test_a_single_model_with_a_pipeline():
    def layers():
        torch.manual_seed(0)
        return nn.Sequential(nn.Embedding(61, 24), nn.Linear(24, 24), nn.Tanh(), nn.Linear(24, 61))

    criterion = GPTLMLoss()
    expected, whole = [], layers()
    plain = AdamW(whole.parameters())
    with Strategy(parallel={"pipeline": 2}, pipeline={"microbatches": 4}) as strategy:
        model = layers()
        optimizer = AdamW(model.parameters())
        dataloader = DataLoader(TensorDataset(tokens(), tokens()), batch_size=8)
        lr_scheduler = LinearLR(optimizer)
        model, optimizer, lr_scheduler, dataloader = strategy.initialize(model, optimizer, lr_scheduler, dataloader)
        losses = []
        for _epoch in range(MAX_EPOCHS):
            num_steps = len(dataloader)
            for _step in range(num_steps):
                loss = strategy.execute_pipeline(
                    dataloader, model, criterion, optimizer, return_loss=True, return_outputs=False
                )
                optimizer.step()
                lr_scheduler.step()
                optimizer.zero_grad()
                losses.append(loss.item())
    of_plain = LinearLR(plain)
    for step in range(2 * MAX_EPOCHS):
        rows = tokens()[8 * (step % 2) :][:8]
        loss = criterion(whole(rows), rows)
        loss.backward()
        plain.step()
        of_plain.step()
        plain.zero_grad()
        expected.append(loss.item())
    assert losses == pytest.approx(expected, rel=1e-5)  # sums over microbatches in another order


@dataclass
class Experience:
    sequences: torch.Tensor
    reward: torch.Tensor


class Critic(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.table, self.value = nn.Embedding(61, 16), nn.Linear(16, 1)

    def forward(self, sequences):
        return self.value(self.table(sequences).mean(1)).squeeze(-1)


def run_actor_and_critic(of_actor, of_critic, parts):
    """Two models in one process; `parts` says which of them train."""
    actor, critic = GPT2(), Critic()
    actor_optim, critic_optim = AdamW(actor.parameters()), AdamW(critic.parameters())
    actor_loss_fn, critic_loss_fn = GPTLMLoss(), nn.functional.mse_loss
    if of_actor is of_critic:
        actor, critic, actor_optim, critic_optim = of_actor.initialize(actor, critic, actor_optim, critic_optim)
    else:
        actor, actor_optim = of_actor.initialize(actor, actor_optim)
        critic, critic_optim = of_critic.initialize(critic, critic_optim)
    replay_buffer = [Experience(each, each.float().mean(1)) for each in tokens().split(4)]
    for _epoch in range(MAX_EPOCHS):
        for experience in replay_buffer:
            if "actor" in parts:
                action_log_probs = actor(experience.sequences).logits
                actor_loss = actor_loss_fn(action_log_probs, experience.sequences)
                of_actor.backward(actor_loss, actor_optim)
                actor_optim.step()
                actor_optim.zero_grad()
            if "critic" in parts:
                values = critic(experience.sequences)
                critic_loss = critic_loss_fn(values, experience.reward)
                of_critic.backward(critic_loss, critic_optim)
                critic_optim.step()
                critic_optim.zero_grad()
    return {
        name: [parameter.detach().clone() for parameter in model.parameters()]
        for name, model in (("actor", actor), ("critic", critic))
        if name in parts
    }


@pytest.mark.ranks(2, timeout=120)
@pytest.mark.parametrize("one", [True, False], ids=["one strategy", "a strategy each"])
def test_actor_and_critic_in_one_process(one):
    """Taking turns changes no bit."""

    def strategies():
        first = Strategy(zero=2, clip_norm=1.0)
        return first, first if one else Strategy(precision="bf16-amp")

    together = run_actor_and_critic(*strategies(), ("actor", "critic"))
    for name in ("actor", "critic"):
        alone = run_actor_and_critic(*strategies(), (name,))
        assert all(torch.equal(*each) for each in zip(alone[name], together[name], strict=True))


@pytest.mark.ranks(2, timeout=120)
def test_gradients_are_accumulated_without_sync():
    with Strategy() as strategy:
        model = GPT2()
        optimizer = AdamW(model.parameters())
        model, optimizer = strategy.initialize(model, optimizer)
        criterion, rows = GPTLMLoss(), tokens().tensor_split(2)[strategy.groups.rank("data")]
        with strategy.no_sync(model):
            strategy.backward(criterion(model(rows[:4]).logits, rows[:4]) / 2, optimizer)
        strategy.backward(criterion(model(rows[4:]).logits, rows[4:]) / 2, optimizer)
        norm = optimizer.step().grad_norm
        whole = GPT2()
        criterion(whole(tokens()).logits, tokens()).backward()
        expected = torch.nn.utils.get_total_norm([each.grad for each in whole.parameters()])
        torch.testing.assert_close(norm.float(), expected, rtol=1e-5, atol=0)
