"""The argument of llamarl/planner/simulation/variants.py in a form that can be computed."""

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Budget:
    """The quantities of the argument; `trainer_s` and `generator_s` are (per batch, per sample):
    eta(b) = per batch / b + per sample, strictly falling in b. Sizes in bytes."""

    num_samples: int
    num_gpus: int
    memory_bytes: float
    weight_bytes: float
    state_factor: float
    activation_bytes: float
    kv_bytes: float
    trainer_s: tuple[float, float]
    generator_s: tuple[float, float]
    degrees: tuple[int, ...]

    def sync_s(self) -> float:
        """The best synchronous step; infinite if nothing fits."""
        fixed = (self.state_factor + 1) * self.weight_bytes
        times = [float("inf")]
        for degree in self.degrees:
            room = self.memory_bytes * degree - fixed
            for num_trained in self._batches(room / self.activation_bytes):
                rest = room - num_trained * self.activation_bytes
                num_running = min(int(rest / self.kv_bytes), self.num_samples)
                if num_running >= 1:
                    times.append(
                        degree
                        * (_eta(self.trainer_s, num_trained) + _eta(self.generator_s, num_running))
                    )
        return min(times) * self.num_samples / self.num_gpus

    def async_s(self) -> float:
        """The best asynchronous step, at theta*; infinite if nothing fits."""
        a = min(self._times(self.state_factor, self.activation_bytes, self.trainer_s))
        c = min(self._times(1.0, self.kv_bytes, self.generator_s))
        return (a + c) * self.num_samples / self.num_gpus

    def best_share(self) -> float:
        """theta*: the trainer's share of the GPUs."""
        a = min(self._times(self.state_factor, self.activation_bytes, self.trainer_s))
        c = min(self._times(1.0, self.kv_bytes, self.generator_s))
        return a / (a + c)

    def _times(
        self, factor: float, sample_bytes: float, seconds: tuple[float, float]
    ) -> Iterator[float]:
        """m eta(b) of one role, at the largest batch that fits each degree."""
        yield float("inf")
        for degree in self.degrees:
            room = self.memory_bytes * degree - factor * self.weight_bytes
            batch = min(int(room / sample_bytes), self.num_samples)
            if batch >= 1:
                yield degree * _eta(seconds, batch)

    def _batches(self, most: float) -> range:
        """All batch sizes that fit, thinned out when there are many."""
        most = min(int(most), self.num_samples)
        return range(1, most + 1, max(1, most // 64))


def _eta(seconds: tuple[float, float], batch: int) -> float:
    """Seconds per sample at this batch size."""
    return seconds[0] / batch + seconds[1]
