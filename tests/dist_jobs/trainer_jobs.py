"""Jobs of tests/test_hf.py: every process is a node with its own Trainer."""

from pathlib import Path

import torch
from kit.local_sgd import trainable
from safetensors.torch import load_file
from torch.utils.data import SequentialSampler
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

from aedit.async_sgd.rules import Average, Nesterov
from aedit.edit import EditCallback, EditConfig, EverySteps, MeanExchange, PenaltyConfig
from aedit.proto.transports import TorchTransport

PLAIN = PenaltyConfig(weights="uniform", detector="off", clip=None)


def tiny_llama():
    shape = LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=16,
        bos_token_id=0,
        eos_token_id=1,
    )
    with torch.random.fork_rng():
        torch.manual_seed(5)
        return LlamaForCausalLM(shape)


def samples(node, count=32):
    random = torch.Generator().manual_seed(100 + node)
    return [torch.randint(32, (12,), generator=random) for _ in range(count)]


def arguments(out, rows=2, **options):
    usual = {
        "per_device_train_batch_size": rows,
        "learning_rate": 0.1,
        "optim": "sgd",
        "lr_scheduler_type": "constant",
        "max_grad_norm": 0.0,
        "use_cpu": True,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
        "logging_strategy": "no",
        "dataloader_pin_memory": False,
    }
    return TrainingArguments(output_dir=str(out), **(usual | options))


class InOrder(Trainer):
    def _get_train_sampler(self, dataset=None):
        return SequentialSampler(self.train_dataset)


def trainer(model, data, args, *callbacks, held_out=None):
    rows = [{"input_ids": ids, "labels": ids} for ids in data]
    held_out = held_out and [{"input_ids": ids, "labels": ids} for ids in held_out]
    return InOrder(
        model=model, args=args, train_dataset=rows, eval_dataset=held_out, callbacks=list(callbacks)
    )


def callback(transport, every=2, outer=None, penalty=PLAIN, **options):
    exchange = MeanExchange(transport, outer=outer or Average(), penalty=penalty)
    return EditCallback(exchange=exchange, schedule=EverySteps(every), **options)


def parameters(model):
    return {name: p.detach().clone() for name, p in trainable(model)}


class Rounds(TrainerCallback):
    """Trainer callback that watches the callback under test and runs before it."""

    def __init__(self, watched):
        self.watched, self.steps = watched, []

    def on_step_begin(self, args, state, control, **kwargs):
        self.watched.sync.on_round = lambda outcome, waited_s: self.steps.append(outcome.round.steps)


def train_together(rank, size, out, every, max_steps, accumulate=1, rows=2):
    transport, model = TorchTransport(timeout_s=120), tiny_llama()
    added = callback(transport, every)
    rounds = Rounds(added)
    steps = max_steps[rank] if isinstance(max_steps, list) else max_steps
    options = {"max_steps": steps, "gradient_accumulation_steps": accumulate, "rows": rows}
    trainer(model, samples(rank), arguments(f"{out}/{rank}", **options), added, rounds).train()
    transport.close()
    return {
        "parameters": parameters(model),
        "rounds": rounds.steps,
        "hooks": sum(len(module._forward_pre_hooks) for module in model.modules()),
    }


class Losses(TrainerCallback):
    def __init__(self):
        self.seen = []

    def on_evaluate(self, args, state, control, metrics, **kwargs):
        self.seen.append((state.global_step, metrics["eval_loss"]))


def evaluate_and_save(rank, size, out, max_steps, options, count=32):
    """Return the checkpoints by step and the losses reported."""
    transport, losses = TorchTransport(timeout_s=120), Losses()
    args = arguments(f"{out}/{rank}", max_steps=max_steps, **options)
    data, held_out = samples(rank, count), samples(9, 4)
    trainer(tiny_llama(), data, args, callback(transport, 2), losses, held_out=held_out).train()
    transport.close()
    return saved_under(f"{out}/{rank}"), losses.seen


def saved_under(directory):
    found = Path(directory).glob("checkpoint-*/model.safetensors")
    return {int(path.parent.name.removeprefix("checkpoint-")): load_file(path) for path in found}


class StopAtEvaluation(TrainerCallback):
    """Trainer callback that stops after an evaluation, as early stopping does: the step is already over."""

    def __init__(self, step):
        self.step = step

    def on_evaluate(self, args, state, control, **kwargs):
        control.should_training_stop = state.global_step == self.step


def stop_early(rank, size, out):
    """Evaluate every node on its own samples; return its final parameters and its own best checkpoint."""
    transport, model = TorchTransport(timeout_s=120), tiny_llama()
    options = {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2}
    args = arguments(f"{out}/{rank}", max_steps=9, load_best_model_at_end=True, **options)
    added, early = callback(transport, 3), StopAtEvaluation(4)
    made = trainer(model, samples(rank), args, added, early, held_out=samples(10 - rank, 4))
    made.train()
    transport.close()
    best = saved_under(f"{out}/{rank}")[made.state.best_global_step]
    return made.state.global_step, added.sync.round_id, parameters(model), best, made.state.best_metric


class StopAt(TrainerCallback):
    def __init__(self, step):
        self.step = step

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            raise KeyboardInterrupt


def stop_and_resume(rank, size, out, every, max_steps, stop_at):
    """Return the parameters of an uninterrupted training and of one that was killed and resumed."""

    def train(name, *callbacks, **options):
        transport, model = TorchTransport(timeout_s=120), tiny_llama()
        penalty = PenaltyConfig(warmup_rounds=2)
        args = arguments(
            f"{out}/{name}/{rank}", max_steps=max_steps, save_strategy="steps", save_steps=stop_at,
            optim="adamw_torch", learning_rate=0.01,
        )  # fmt: skip
        added = callback(transport, every, outer=Nesterov(), penalty=penalty)
        try:
            trainer(model, samples(rank), args, added, *callbacks).train(**options)
        except KeyboardInterrupt:
            added.detach()
        transport.close()
        return parameters(model)

    whole = train("whole")
    train("parts", StopAt(stop_at))
    return whole, train("parts", resume_from_checkpoint=f"{out}/parts/{rank}/checkpoint-{stop_at}")


def warm_up(rank, size, out, max_steps, max_grad_norm):
    transport, model = TorchTransport(timeout_s=120), tiny_llama()
    added = callback(transport, config=EditConfig(warmup_steps="all"), max_grad_norm=max_grad_norm)
    trainer(model, samples(rank), arguments(f"{out}/{rank}", max_steps=max_steps), added).train()
    transport.close()
    return parameters(model)
