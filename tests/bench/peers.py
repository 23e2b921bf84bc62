"""What other systems do: their published rules, written anew from their descriptions, one class each.

Each `fires(loss, grad_norm)` judges one step and learns from it as the original does, masking and NaN included. The
names of the rules are those of PEERS.md, section 5; the sources are named with each.
"""

import math
from collections import deque
from itertools import islice


def _mean(values):
    return sum(values) / len(values)


def _stddev(values, *, sample=False):
    mean, count = _mean(values), len(values)
    return math.sqrt(sum((value - mean) ** 2 for value in values) / (count - 1 if sample else count))


class KillLossSpike:
    """R1, llm-foundry's KillLossSpike: more than 4 losses in a row at twice the window's mean, or many above a cap."""

    def __init__(self, total_steps=4000):
        self._total_steps = total_steps
        self._size = 100
        self._window = deque()
        self._grown = False
        self._in_a_row = self._seen = 0
        self._cap = 10.0

    def fires(self, loss, grad_norm):
        """Judge a step."""
        del grad_norm
        fired = False
        full = len(self._window) >= self._size
        if full and not self._grown:
            self._grown = True
            self._cap = min(max(self._window), 10.0)
            self._size = max(self._size, round(0.05 * self._total_steps))
            full = len(self._window) >= self._size
        if full:
            if loss >= 2.0 * _mean(self._window):
                self._in_a_row += 1
                fired = self._in_a_row > 4
            else:
                self._in_a_row = 0
                high = sum(value > self._cap for value in self._window)
                fired = self._seen >= 2 * self._size and high >= self._size / 2
        self._window.append(loss)
        if len(self._window) > self._size:
            self._window.popleft()
        self._seen += 1
        return fired


class SkipStep:
    """R2, OLMo-core's SkipStepOptimizer: 6 sample deviations above the last 128, from the 64th on, either signal."""

    def __init__(self):
        self._windows = deque(maxlen=129), deque(maxlen=129)

    def fires(self, loss, grad_norm):
        """Judge a step."""
        fired = False
        for window, value in zip(self._windows, (loss, grad_norm), strict=True):
            window.append(value)
            if len(window) < 64:
                continue
            before = list(islice(window, len(window) - 1))
            # Written as "not within", so that NaN skips.
            fired |= not (value - _mean(before) <= 6.0 * _stddev(before, sample=True))
        return fired


class StabilityMonitor:
    """R3, OLMo-core's StabilityMonitor: 6 population deviations above a full window of 128, either signal."""

    def __init__(self):
        self._windows = deque(maxlen=128), deque(maxlen=128)

    def fires(self, loss, grad_norm):
        """Judge a step."""
        fired = False
        for window, value in zip(self._windows, (loss, grad_norm), strict=True):
            if len(window) == 128:
                stddev = _stddev(window)
                fired |= stddev >= 1e-10 and value > _mean(window) + 6.0 * stddev
            window.append(value)
        return fired


class MegatronSpiky:
    """R4, Megatron's check for spiky losses: ten times the largest of the first 100."""

    def __init__(self):
        self._seen, self._largest = 0, 0.0

    def fires(self, loss, grad_norm):
        """Judge a step."""
        del grad_norm
        if not math.isfinite(loss):
            return False
        if self._seen < 100:
            self._seen += 1
            self._largest = max(self._largest, abs(loss))
            return False
        return abs(loss) >= 10.0 * self._largest


class ZClip:
    """R5, ZClip: z above 2.5 of the gradient norm against an EMA of mean and variance, fed with the clipped value.

    `limit` is what it clips the norm of the last step to, infinite where it did not fire.
    """

    _ALPHA, _Z, _WARMUP = 0.97, 2.5, 25

    def __init__(self):
        self._first = []
        self._mean = self._variance = math.nan
        self.limit = math.inf

    def fires(self, loss, grad_norm):
        """Judge a step."""
        del loss
        self.limit = math.inf
        if len(self._first) < self._WARMUP:
            self._first.append(grad_norm)
            self._mean = _mean(self._first)
            self._variance = _stddev(self._first) ** 2
            return False
        stddev = math.sqrt(self._variance) if self._variance >= 0.0 else math.nan
        z = (grad_norm - self._mean) / (stddev + 1e-6)
        fired = z > self._Z
        # "Reciprocal" adaptive clipping: mean + z_thresh^2 / z deviations.
        if fired:
            self.limit = self._mean + self._Z**2 / z * stddev
        clipped = min(grad_norm, self.limit)
        self._mean = self._ALPHA * self._mean + (1.0 - self._ALPHA) * clipped
        self._variance = self._ALPHA * self._variance + (1.0 - self._ALPHA) * (clipped - self._mean) ** 2
        return fired


class Lightning:
    """R6, Lightning's SpikeDetection: above the last loss, and away from the mean of 10 by twice that mean."""

    def __init__(self):
        self._window = deque(maxlen=10)
        self._last = math.nan

    def fires(self, loss, grad_norm):
        """Judge a step."""
        del grad_norm
        fired = not math.isfinite(loss)
        if self._window and not fired:
            mean = _mean(self._window)
            fired = loss > self._last and abs(loss - mean) >= 2.0 * mean
        if not fired:
            self._window.append(loss)
            self._last = loss
        return fired


class EmaRatio:
    """R7, a ratio to the EMA of the values that did not fire; on the loss or on the gradient norm."""

    def __init__(self, ratio, *, on_norm=False, warmup=50):
        self._ratio, self._on_norm, self._warmup = ratio, on_norm, warmup
        self._ema, self._seen = None, 0

    def fires(self, loss, grad_norm):
        """Judge a step."""
        value = grad_norm if self._on_norm else loss
        self._seen += 1
        if not math.isfinite(value):
            return True
        fired = self._seen > self._warmup and value / self._ema > self._ratio
        if not fired:
            self._ema = value if self._ema is None else 0.99 * self._ema + 0.01 * value
        return fired


class MeanSigma:
    """R8, mean and 3 population deviations of the last 100 values; on the loss or on the gradient norm."""

    def __init__(self, *, on_norm=False):
        self._window = deque(maxlen=100)
        self._on_norm = on_norm

    def fires(self, loss, grad_norm):
        """Judge a step."""
        value = grad_norm if self._on_norm else loss
        if not math.isfinite(value):
            return True
        full = len(self._window) == 100
        fired = full and value > _mean(self._window) + 3.0 * _stddev(self._window)
        self._window.append(value)
        return fired


class Metaseq:
    """R9, metaseq's skip of spikes: the ratio to an exponential mean of span 9, not updated by what fires."""

    def __init__(self, ratio=1.2):
        self._ratio, self._mean, self._seen = ratio, None, 0

    def fires(self, loss, grad_norm):
        """Judge a step."""
        del grad_norm
        self._seen += 1
        if self._mean is None:
            self._mean = loss
            return False
        fired = loss / self._mean > self._ratio
        if not fired:
            self._mean = 0.8 * self._mean + 0.2 * loss
        return fired


class LlmC:
    """R10, llm.c's outlier detector: z above 7 in a window of 128 that holds the value itself, either signal."""

    def __init__(self):
        self._windows = deque(maxlen=128), deque(maxlen=128)
        # Running sums, as there: a value that is not finite stays in them for ever.
        self._sums = [[0.0, 0.0], [0.0, 0.0]]

    def fires(self, loss, grad_norm):
        """Judge a step."""
        fired = False
        for window, sums, value in zip(self._windows, self._sums, (loss, grad_norm), strict=True):
            leaving = window[0] if len(window) == 128 else 0.0
            window.append(value)
            sums[0] += value - leaving
            sums[1] += value * value - leaving * leaving
            if len(window) < 128:
                continue
            mean = sums[0] / 128
            variance = sums[1] / 128 - mean * mean
            z = (value - mean) / math.sqrt(variance) if variance > 0.0 else math.nan
            fired |= math.isfinite(z) and z > 7.0
        return fired


class Axlearn:
    """R11, axlearn's skip of gradients: 20 times the EMA of the valid ones, or mean + 20 deviations after 500."""

    def __init__(self, *, by_deviation=False):
        self._by_deviation = by_deviation
        self._count, self._mean, self._square = 0, 1.0, 1.0

    def fires(self, loss, grad_norm):
        """Judge a step."""
        del loss
        if not math.isfinite(grad_norm):
            return True
        limit = 20.0 * self._mean
        if self._by_deviation:
            variance = max(self._square - self._mean**2, 0.0)
            limit = self._mean + 20.0 * math.sqrt(variance) if self._count >= 500 else math.inf
        if grad_norm >= limit:
            return True
        # Bias-corrected: d (1 - d^c) / (1 - d^(c+1)).
        decay = 0.99 * (1.0 - 0.99**self._count) / (1.0 - 0.99 ** (self._count + 1))
        self._mean = decay * self._mean + (1.0 - decay) * grad_norm
        self._square = decay * self._square + (1.0 - decay) * grad_norm**2
        self._count += 1
        return False


class OutlierDetector:
    """R12, llm-foundry's OutlierDetector: 7.5 times the mean of the steps 1000 to 500 ago, of the gradient norm."""

    def __init__(self, ratio=7.5):
        self._ratio, self._window = ratio, deque(maxlen=1000)

    def fires(self, loss, grad_norm):
        """Judge a step."""
        del loss
        fired = len(self._window) == 1000 and grad_norm > self._ratio * _mean(list(islice(self._window, 500)))
        self._window.append(grad_norm)
        return fired


PEERS = {
    "R1 KillLossSpike": KillLossSpike,
    "R2 SkipStep 128/6": SkipStep,
    "R3 StabilityMonitor": StabilityMonitor,
    "R4 Megatron spiky": MegatronSpiky,
    "R5 ZClip 2.5": ZClip,
    "R6 Lightning": Lightning,
    "R7 EMA 3.0 loss": lambda: EmaRatio(3.0),
    "R7 EMA 1.2 loss": lambda: EmaRatio(1.2),
    "R7 EMA 3.0 norm": lambda: EmaRatio(3.0, on_norm=True),
    "R8 mean+3s loss": MeanSigma,
    "R8 mean+3s norm": lambda: MeanSigma(on_norm=True),
    "R9 metaseq 1.2": Metaseq,
    "R10 llm.c z>7": LlmC,
    "R11 axlearn 20x": Axlearn,
    "R11 axlearn 20 std": lambda: Axlearn(by_deviation=True),
    "R12 outliers 7.5x": OutlierDetector,
}
