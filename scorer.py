"""Several rewards over many batches of images, in this process or in worker processes beside the rollout."""

import multiprocessing
import signal
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any, NamedTuple

import torch
from torch import Tensor

from reward_models import Reward, RewardFunction
from rewards import load_reward, score_images

START_TIMEOUT = 600.0  # seconds for a worker to import and to load its models


class Worker(NamedTuple):
    """A process that scores, and our end of the pipe to it."""

    process: BaseProcess
    connection: Connection


class Scorer:
    """Several rewards over many batches: submit them one by one, then ask for the results, in the same order.

    Without workers a batch is scored when it is submitted. With them it is sent to one and the caller goes on, or
    waits where every worker is busy. A worker loads all rewards; their models are on the device between to(device) and
    to("cpu"). Any failure raises ValueError that names reward and samples.
    """

    def __init__(self, rewards: Mapping[str, str | RewardFunction], *, num_workers: int = 0, timeout: float = 600.0):
        """rewards: by label, a name for load_reward or a function (of a module, where workers must find it)."""
        self.timeout, self.seconds_waited = timeout, 0.0
        self.workers, self.started = [], False
        self.submitted = 0
        self.waiting: deque[tuple[Worker, str]] = deque()
        self.finished: list[dict[str, list[float]]] = []
        self.loaded = {} if num_workers else load_rewards(rewards)
        context = multiprocessing.get_context("spawn")  # a fork would copy locks of threads and CUDA's state
        for _ in range(num_workers):
            ours, theirs = context.Pipe()
            process = context.Process(target=serve_scores, args=(theirs, dict(rewards)), daemon=True)
            process.start()
            theirs.close()  # so that a worker that dies closes the pipe
            self.workers.append(Worker(process, ours))

    def to(self, device: torch.device | str, labels: Sequence[str]) -> None:
        """Move the models of these rewards, after all that was submitted; returns when they are there."""
        self.finish()
        move_models(self.loaded, labels, device)
        for worker in self.workers:
            self.send(worker, ("to", str(device), list(labels)), "while models were moved")
        self.finish(keep=False)

    def submit(
        self,
        labels: Sequence[str],
        images: Tensor,
        prompts: list[str],
        metadata: list[dict[str, Any]],
        sample_indices: Sequence[int],
    ) -> None:
        """Score one batch with the rewards of these labels, now or in a worker. images (B, 3, H, W) on the CPU."""
        images = images.contiguous()  # as a worker receives them: the order of a sum depends on it
        if not self.workers:
            started = time.perf_counter()
            rewards = {label: self.loaded[label].score for label in labels}
            self.finished.append(score_images(rewards, images, prompts, metadata, sample_indices))
            self.seconds_waited += time.perf_counter() - started
            return
        if len(self.waiting) == len(self.workers):  # the oldest is the one whose turn it is
            self.receive()
        task = ("score", list(labels), images.numpy(), prompts, metadata, list(sample_indices))
        worker = self.workers[self.submitted % len(self.workers)]
        self.submitted += 1
        self.send(worker, task, f"{', '.join(labels)} on samples {sample_indices[0]} to {sample_indices[-1]}")

    def results(self) -> dict[str, list[float]]:
        """The values of all batches since the last call, by label, in order."""
        self.finish()
        scores, self.finished = self.finished, []
        return {
            label: [value for batch in scores for value in batch[label]] for label in (scores[0] if scores else ())
        }

    def finish(self, *, keep: bool = True) -> None:
        """Wait for every worker's answer."""
        while self.waiting:
            self.receive(keep=keep)

    def send(self, worker: Worker, task: tuple, what: str) -> None:
        """Give an idle worker something to do."""
        if not self.started:
            self.started = True
            for number, each in enumerate(self.workers):
                self.wait_for(each, f"worker {number} while loading the rewards", START_TIMEOUT)
        with suppress(OSError):  # it is dead: receive says so
            worker.connection.send(task)
        self.waiting.append((worker, what))

    def receive(self, *, keep: bool = True) -> None:
        """Wait for the oldest answer that is due."""
        worker, what = self.waiting.popleft()
        scores = self.wait_for(worker, what, self.timeout)
        if keep:
            self.finished.append(scores)

    def wait_for(self, worker: Worker, what: str, timeout: float) -> Any:
        """A worker's next answer. Raises ValueError for its error, its death, or no answer in time."""
        started = time.perf_counter()
        try:
            if not worker.connection.poll(timeout):
                worker.process.kill()
                raise ValueError(f"reward {what}: no answer within {timeout:g} s; mend it or raise --reward_timeout")
            kind, value = worker.connection.recv()
        except (EOFError, ConnectionError) as error:
            worker.process.join(10)
            code = worker.process.exitcode
            raise ValueError(f"reward {what}: its worker ended with exit code {code}, see above") from error
        finally:
            self.seconds_waited += time.perf_counter() - started
        if kind == "error":
            raise ValueError(value)
        return value

    def take_seconds_waited(self) -> float:
        """How long the caller was kept waiting for scores since the last call."""
        seconds, self.seconds_waited = self.seconds_waited, 0.0
        return seconds

    def close(self) -> None:
        """End the workers; they also end with this process."""
        for worker in self.workers:
            worker.connection.close()
            worker.process.join(10)
            worker.process.kill()


def load_rewards(rewards: Mapping[str, str | RewardFunction]) -> dict[str, Reward]:
    """Rewards by label from names or functions."""
    return {label: Reward(name) if callable(name) else load_reward(name) for label, name in rewards.items()}


def move_models(rewards: Mapping[str, Reward], labels: Sequence[str], device: torch.device | str) -> None:
    """Put the models of the rewards of these labels on a device."""
    for label, reward in rewards.items():
        if label in labels and reward.model is not None:
            reward.model.to(device)


def serve_scores(connection: Connection, names: Mapping[str, str | RewardFunction]) -> None:
    """What a worker process does: load the rewards, then answer each task with ("ok", value) or ("error", text)."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the training script's to answer
    torch.set_num_threads(1)  # there is one worker a batch
    answer: tuple[str, Any]
    try:
        rewards = load_rewards(names)
        answer = "ok", None
    except ValueError as error:
        answer = "error", str(error)
    while True:
        try:
            connection.send(answer)
            kind, *task = connection.recv()
        except (EOFError, OSError):  # the script has ended
            return
        answer = "ok", None
        try:
            if kind == "to":
                device, labels = task
                move_models(rewards, labels, device)
                if torch.cuda.is_initialized():
                    torch.cuda.empty_cache()  # another process wants that memory now
            else:
                labels, images, *rows = task
                functions = {label: rewards[label].score for label in labels}
                answer = "ok", score_images(functions, torch.from_numpy(images), *rows)
        except ValueError as error:
            answer = "error", str(error)
