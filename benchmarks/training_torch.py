"""The factorial HMM's network in PyTorch, for `benchmarks.training`, in an environment of its own.

Same sizes, masks, residuals, loss and minibatches by index as `retrodict`'s network; fused Adam,
and neither gradient clipping nor a guard against overflow, which ours has. For every number read
from standard input it makes as many steps, and writes the seconds taken.
"""

import sys
import time
from itertools import pairwise

import numpy as np
import torch
from torch.nn import functional as F  # noqa: N812 (everybody's name for it)

BITS, INPUTS, HIDDEN, BATCH, ROWS = 20, 41, (300, 300, 300, 300), 500, 32_000
FLOOR = 0.001 / BITS


class Network(torch.nn.Module):
    """MADE with a context that adds to every layer, residual layers and direct connections."""

    def __init__(self) -> None:
        super().__init__()
        labels = [np.arange(BITS) + 1]
        labels += [np.repeat(np.arange(BITS), width // BITS) for width in HIDDEN]
        labels += [np.arange(BITS)]
        pairs = [*pairwise(labels), (labels[0], labels[-1])]
        self.weights = torch.nn.ParameterList()
        self.context = torch.nn.ModuleList(torch.nn.Linear(INPUTS, to.size) for to in labels[1:])
        for place, (into, out) in enumerate(pairs):
            mask = torch.tensor(into[None, :] <= out[:, None], dtype=torch.float32)
            self.register_buffer(f"mask{place}", mask)
            scale = mask.sum(1, keepdim=True).clamp(min=1).sqrt()
            self.weights.append(torch.randn(mask.shape) / scale)

    def forward(self, context: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """−log q, averaged."""
        masked = [w * getattr(self, f"mask{place}") for place, w in enumerate(self.weights)]
        features = state = 2 * x - 1
        for layer in range(len(HIDDEN)):
            new = F.silu(F.linear(state, masked[layer]) + self.context[layer](context))
            state = state + new if layer else new
        logits = F.linear(state, masked[-2]) + self.context[-1](context)
        logits = logits + F.linear(features, masked[-1])
        chance = (1 - FLOOR) * torch.sigmoid(torch.where(x > 0.5, logits, -logits)) + FLOOR / 2
        return -chance.log().sum(1).mean()


def main() -> None:
    """Answer requests for steps."""
    torch.manual_seed(0)
    network = Network()
    optimiser = torch.optim.Adam(network.parameters(), lr=1e-3, fused=True)
    context = torch.randint(2, (ROWS, INPUTS)).float()
    x = torch.randint(2, (ROWS, BITS)).float()
    print(torch.__version__, torch.get_num_threads(), flush=True)
    for line in sys.stdin:
        order = torch.randperm(ROWS)
        start = time.perf_counter()
        for step in range(int(line)):
            places = order[step * BATCH % ROWS :][:BATCH]
            optimiser.zero_grad(set_to_none=True)
            loss = network(context[places], x[places])
            loss.backward()
            optimiser.step()
        print(time.perf_counter() - start, float(loss), flush=True)


if __name__ == "__main__":
    main()
