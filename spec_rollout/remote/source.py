"""Rollouts from worker processes of this rank: `RolloutSource` whose samples survive killed workers.

    source = WorkerSource(policy, WorkerConfig(processes=2, rows=16, max_tokens=1024))
    source.update_weights(policy.state_dict(keep_vars=True), version=1)
    source.add(prompts)
    while source.running:
        finished = source.step()

The workers go on while the rank trains: they have all samples from `add` on, report tokens as they are drawn,
and take over new weights between two decode steps. Samples of a worker that died or fell silent continue in
another one, after the tokens that were reported; with coupled sampling that changes no token.

With `servers` rollout servers generate too: `Servers.at("HOST:PORT", ...)`. Each is one more worker.
"""

import json
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from aedit import traces
from aedit.spec_rollout.engine import check_prompt
from aedit.spec_rollout.model import unwrapped
from aedit.spec_rollout.remote.dispatcher import Dispatcher, Report, RequestedSample
from aedit.spec_rollout.remote.links import LinkSettings, Servers
from aedit.spec_rollout.remote.servers import LinkProcess
from aedit.spec_rollout.remote.shared_weights import SharedWeights
from aedit.spec_rollout.remote.workers import WorkerConfig, WorkerPool
from aedit.spec_rollout.sampling import Prompt, Rollout, SampleKey, encode_sampling
from aedit.types import checked
from aedit.weights import sharded, take_part

REBALANCE_S = 0.1
"""Interval of the plans of migrations."""

Window = Callable[[str], AbstractContextManager[object]]
"""Opens an idle window for a cause; see `IdleWork.window`."""


@runtime_checkable
class OnlineLayer(Protocol):
    """The parts of an `OnlineDrafter` that the source uses."""

    @property
    def layer(self) -> Any:
        """Return the `DraftLayer` in use."""

    def adopt(self) -> bool:
        """Use the newest drafter that is better; return whether it is another one."""


@checked()
class WorkerSource:
    """`RolloutSource` of worker processes, which start with it. Used by one thread, which must last."""

    def __init__(
        self,
        policy: Any,
        config: WorkerConfig,
        *,
        drafter: Any = None,
        window: Window | None = None,
        report: Report | None = None,
        servers: Servers | None = None,
    ) -> None:
        """Start the workers. They load torch meanwhile; nothing waits for them.

        Args:
            policy: `transformers` model whose weights will come, sharded or not.
            config: Settings.
            drafter: `DraftLayer` for the arms `layer:...`, whose newer weights come by `update_drafter`; or
                `OnlineDrafter`, whose newest weights follow by themselves.
            window: Opened with the cause `rollouts` or `longest sample` while `step` waits.
            report: Called with an event and its fields: `rollout_retried` for samples that were taken back
                from a worker.
            servers: Rollout servers that generate too.

        Raises:
            ValueError: The arms need a drafter that is missing.
        """
        self._online = drafter if isinstance(drafter, OnlineLayer) else None
        if self._online is not None:
            drafter = self._online.layer
        if drafter is None and any(arm.startswith("layer") for arm in config.arms):
            raise ValueError(f"arms {', '.join(config.arms)}: layer needs a drafter")
        policy = unwrapped(policy)
        self._config, self._window = config, window or nullcontext
        self._version = 0
        self._vocabulary = int(policy.config.get_text_config().vocab_size)
        self._weights = SharedWeights("aedit-policy", policy.state_dict(keep_vars=True), config.dtype)
        self._drafter, self._drafter_version = None, 0
        if drafter is not None:
            self._drafter = SharedWeights("aedit-drafter", drafter.state_dict(), drafter.gain.dtype)
            # Of a negative version: untrained, and not tried.
            is_trained = getattr(self._online, "is_trained", True)
            self._drafter.publish(drafter.state_dict(), 0 if is_trained else -1)
        report = report or (lambda event, fields: None)
        tokenizer = str(config.tokenizer or "")
        link = None
        if servers is not None:
            described = self._weights.described()
            settings = LinkSettings.of(servers, described, self._vocabulary, tokenizer)
            link = LinkProcess(settings, report)
        begin = {
            "make": config.make,
            "engine": {
                "model": json.loads(policy.config.to_json_string(use_diff=False)),
                "dtype": str(config.dtype).removeprefix("torch."),
                "device": config.device,
                "rows": config.rows,
                "max_tokens": config.max_tokens,
                "arms": config.arms,
                "tokenizer": tokenizer,
                "taps": drafter.shape.taps if drafter is not None else 0,
                "drafter": asdict(drafter.shape) if drafter is not None else None,
                "options": dict(config.options),
            },
            "threads": config.threads,
            "weights": self._weights.described(),
            "drafter": self._drafter.described() if self._drafter else None,
        }
        fds = tuple(each.fd for each in (self._weights, self._drafter) if each is not None)
        self._pool = WorkerPool(begin, fds, config, link)
        self._dispatcher = Dispatcher(self._pool, config, report)
        self._rebalanced_s = 0.0
        self._pool.start_due()

    @property
    def version(self) -> int:
        """Return the newest policy version that was published to the workers; 0 is none."""
        return self._version

    @property
    def running(self) -> int:
        """Return the number of samples that were added and have not been returned."""
        return len(self._dispatcher.samples) + len(self._dispatcher.finished)

    def update_weights(self, weights: Mapping[str, Tensor] | None, version: int) -> None:
        """Publish weights. Each worker takes them over between two decode steps, without an answer.

        Samples that are added later have only tokens of this version or newer ones. All ranks of a node call
        it together if the weights are sharded.

        Raises:
            ValueError: The weights do not fit, or the version is not a new one. Nothing has changed.
        """
        if weights is None:
            raise ValueError("rollout workers have weights of their own: pass the policy's state_dict")
        if version < self._version:
            raise ValueError(f"version {version} is below version {self._version}, which the workers have")
        if version == self._version:
            if sharded(weights):
                take_part(weights)
            if not self._weights.holds(weights):
                raise ValueError(f"version {version} is that of other weights: pass a larger one")
            return
        self._weights.publish(weights, version)
        self._version = self._dispatcher.version = version
        if self._pool.link is not None:
            self._pool.link.publish(version)

    def update_drafter(self, drafter: Any, version: int) -> None:
        """Publish the weights of a trained `DraftLayer`, with which the workers draft from then on."""
        if self._drafter is None:
            raise ValueError("the workers have no layer drafter: pass one to WorkerSource")
        self._drafter.publish(drafter.state_dict(), version)
        self._drafter_version = version

    def add(self, prompts: Sequence[Prompt]) -> None:
        """Request one sample per prompt, and distribute them over the workers.

        Raises:
            ValueError: A prompt cannot be served, has no ids or those of another sample, or no weights were
                published. None is added.
        """
        if not self._version:
            raise ValueError("the workers have no weights yet: call update_weights first")
        samples = self._dispatcher.samples
        new: dict[SampleKey, RequestedSample] = {}
        for prompt in prompts:
            has_tokenizer = self._config.tokenizer is not None
            check_prompt(prompt, self._vocabulary, self._config.max_tokens, has_tokenizer)
            sampling = encode_sampling(prompt.sampling, f"sample {prompt.name}")
            if not prompt.has_key or prompt.key in samples or prompt.key in new:
                raise ValueError(f"prompt {prompt.name}: give it ids (rollout, sample) that no other one has")
            span = traces.opened("sample", sample=prompt.sample)
            new[prompt.key] = RequestedSample(prompt.to_rollout(), sampling, span=span)
        samples.update(new)
        self._dispatcher.place_waiting()

    def rollout(self, key: SampleKey) -> Rollout:
        """Return an unfinished sample, which grows with the steps."""
        return self._dispatcher.samples[key].rollout

    def step(self, *, for_tokens: bool = False) -> list[Rollout]:
        """Return the samples that have finished; without any, wait up to `WorkerConfig.wait_s` for one.

        for_tokens: wait for any news of a worker instead.

        Raises:
            RuntimeError: The workers die again and again, or one sample ends each worker that has it.
        """
        if self._online is not None and self._online.adopt():
            self.update_drafter(self._online.layer, self._drafter_version + 1)
        dispatcher, workers = self._dispatcher, self._pool.workers
        dispatcher.look()
        deadline = time.monotonic() + self._config.wait_s
        if dispatcher.samples and not dispatcher.finished:
            is_last = len(dispatcher.samples) <= max(1, len(workers))  # of each worker, at most
            with self._window("longest sample" if is_last else "rollouts"):
                while not dispatcher.finished and (left_s := deadline - time.monotonic()) > 0:
                    self._pool.wait(left_s)
                    dispatcher.look()
                    if for_tokens:
                        break
        if time.monotonic() - self._rebalanced_s >= REBALANCE_S and len(workers) > 1:
            dispatcher.rebalance()
            self._rebalanced_s = time.monotonic()
        finished, dispatcher.finished = dispatcher.finished, []
        return finished

    def accuse(self, server: str, reason: str, evidence: Mapping[str, Any]) -> None:
        """Report a server whose samples are not those of the policy.

        Nothing more of what it has sent is used, and it gets no more samples for a while.

        Args:
            server: Name in `Rollout.servers`.
            reason: In words.
            evidence: For the hub, if there is one: what JSON can hold.
        """
        if self._pool.link is not None:
            self._pool.link.accuse(server, reason, evidence)

    def pending(self) -> list[Prompt]:
        """Return the unfinished samples, as prompts that continue them after the tokens reported so far."""
        return [sample.prompt() for sample in self._dispatcher.samples.values()]

    def cancel(self, keys: Collection[SampleKey] | None = None) -> None:
        """End samples that were added and have not been returned; their keys may be added again.

        keys: None: all.
        """
        self._dispatcher.cancel(keys)

    def status(self) -> Mapping[str, Any]:
        """Return counts and times, summed over all workers so far.

        `worker_s` are the seconds in which a process has generated, `worker_idle_s` those in which it had no
        sample since its first one, means over them. `drafted_length` are
        tokens per pass in steps with drafts; None without such steps.
        `retried` counts samples that were taken back from dead workers, `moved` those that changed workers.
        """
        figures = self._dispatcher.figures()
        passes = figures.get("drafted_passes", 0)
        generated_s, without_s = (figures.get(name, 0.0) for name in ("rollout_s", "without_samples_s"))
        worker_s = generated_s / self._config.processes if isinstance(generated_s, float) else 0.0
        return {
            "workers": len(self._pool.workers),
            "pids": [worker.pid for worker in self._pool.workers.values() if worker.pid is not None],
            "worker_deaths": self._pool.deaths,
            "worker_silent": self._pool.silent,
            "worker_error": self._pool.last_error,
            "running": self.running,
            "finished": self._dispatcher.num_finished,
            "retried": self._dispatcher.num_retried,
            "moved": self._dispatcher.num_moved,
            "version": self._version,
            "worker_s": worker_s,
            "worker_idle_s": without_s / self._config.processes,
            "drafted_length": figures["drafted_tokens"] / passes if passes else None,
            **(self._pool.link.status() if self._pool.link is not None else {}),
            **figures,
        }

    def close(self) -> None:
        """End the workers."""
        self._pool.close()
        for shared in (self._weights, self._drafter):
            if shared is not None:
                shared.close()
