"""The losses as modules, with PyTorch's arguments, buffers and names."""

from __future__ import annotations

from torch import Tensor, nn

from truncdet._cross_entropy import cross_entropy
from truncdet._ctc_loss import ctc_loss
from truncdet._ctc_loss_arguments import Lengths
from truncdet._nll_loss import nll_loss


class NLLLoss(nn.NLLLoss):
    """`nll_loss` as a module.

    Example:
        >>> logs = torch.zeros(2, 3, 4, 4).log_softmax(1)
        >>> truncdet.NLLLoss()(logs, torch.zeros(2, 4, 4, dtype=torch.int64))
        tensor(1.0986)
    """

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        """See `nll_loss`."""
        return nll_loss(
            input,
            target,
            self.weight,
            ignore_index=self.ignore_index,
            reduction=self.reduction,
        )


class CrossEntropyLoss(nn.CrossEntropyLoss):
    """`cross_entropy` as a module.

    Example:
        >>> loss = truncdet.CrossEntropyLoss(label_smoothing=0.1)
        >>> loss(torch.zeros(2, 3, 4, 4), torch.zeros(2, 4, 4, dtype=torch.int64))
        tensor(1.0986)
    """

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        """See `cross_entropy`."""
        return cross_entropy(
            input,
            target,
            self.weight,
            ignore_index=self.ignore_index,
            reduction=self.reduction,
            label_smoothing=self.label_smoothing,
        )


class CTCLoss(nn.CTCLoss):
    """`ctc_loss` as a module.

    Example:
        >>> logs = torch.zeros(4, 1, 3).log_softmax(2)
        >>> truncdet.CTCLoss(reduction="sum")(logs, torch.tensor([[1, 2]]), (4,), (2,))
        tensor(1.6864)
    """

    def forward(
        self, log_probs: Tensor, targets: Tensor, input_lengths: Lengths, target_lengths: Lengths
    ) -> Tensor:
        """See `ctc_loss`."""
        return ctc_loss(
            log_probs,
            targets,
            input_lengths,
            target_lengths,
            self.blank,
            self.reduction,
            self.zero_infinity,
        )
