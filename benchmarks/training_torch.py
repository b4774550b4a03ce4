"""The factorial HMM's network in PyTorch, for `benchmarks.training`.

Runs in its own environment. Sizes, masks, residuals, loss and minibatches by index are those of
retrodict's network; Adam is fused, without retrodict's gradient clipping and overflow checks. For
every number on standard input it makes that many steps, and prints the seconds.
"""

import sys
import time
from itertools import pairwise

import numpy as np
import torch
from torch.nn import functional as F  # noqa: N812 (the customary name)

BITS, INPUTS, HIDDEN, BATCH, ROWS = 20, 41, (300, 300, 300, 300), 500, 32_000
FLOOR = 0.001 / BITS


class Network(torch.nn.Module):
    """MADE with a context added to every layer, residual layers and direct connections."""

    def __init__(self) -> None:
        super().__init__()
        labels = [np.arange(BITS) + 1]
        labels += [np.repeat(np.arange(BITS), width // BITS) for width in HIDDEN]
        labels += [np.arange(BITS)]
        pairs = [*pairwise(labels), (labels[0], labels[-1])]
        self.weights = torch.nn.ParameterList()
        self.context = torch.nn.ModuleList(torch.nn.Linear(INPUTS, to.size) for to in labels[1:])
        for index, (input_labels, output_labels) in enumerate(pairs):
            mask = torch.tensor(
                input_labels[None, :] <= output_labels[:, None], dtype=torch.float32
            )
            self.register_buffer(f"mask{index}", mask)
            scale = mask.sum(1, keepdim=True).clamp(min=1).sqrt()
            self.weights.append(torch.randn(mask.shape) / scale)

    def forward(self, context: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Mean of −log q."""
        masked = [w * getattr(self, f"mask{index}") for index, w in enumerate(self.weights)]
        features = state = 2 * x - 1
        for layer in range(len(HIDDEN)):
            update = F.silu(F.linear(state, masked[layer]) + self.context[layer](context))
            state = state + update if layer else update
        logits = F.linear(state, masked[-2]) + self.context[-1](context)
        logits = logits + F.linear(features, masked[-1])
        chance = (1 - FLOOR) * torch.sigmoid(torch.where(x > 0.5, logits, -logits)) + FLOOR / 2
        return -chance.log().sum(1).mean()


def main() -> None:
    """Make steps on request."""
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
            rows = order[step * BATCH % ROWS :][:BATCH]
            optimiser.zero_grad(set_to_none=True)
            loss = network(context[rows], x[rows])
            loss.backward()
            optimiser.step()
        print(time.perf_counter() - start, float(loss), flush=True)


if __name__ == "__main__":
    main()
