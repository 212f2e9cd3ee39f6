"""The models of `_models.py` in PyTorch, for Opacus: the same layers, widths and activations."""

from __future__ import annotations

from typing import Any

import torch
from _models import DECODER, LSTM_FEATURES, LSTM_WIDTH, TRANSFORMER, WORD_WIDTH, WORDS
from torch import nn
from torch.nn import functional


def mlp(private: bool) -> nn.Module:
    return nn.Sequential(nn.Linear(784, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10))


def mnist_cnn(private: bool) -> nn.Module:
    return nn.Sequential(
        nn.ZeroPad2d(3),
        nn.Conv2d(1, 16, 8, 2),
        nn.ReLU(),
        nn.MaxPool2d(2, 1),
        nn.Conv2d(16, 32, 4, 2),
        nn.ReLU(),
        nn.MaxPool2d(2, 1),
        nn.Flatten(),
        nn.Linear(512, 32),
        nn.ReLU(),
        nn.Linear(32, 10),
    )


class Residual(nn.Module):
    def __init__(self, before: int, channels: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            normalised(before, channels, 3, stride), nn.ReLU(), normalised(channels, channels, 3, 1)
        )
        self.short = normalised(before, channels, 1, stride) if stride > 1 else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.relu(self.short(x) + self.body(x))


def normalised(before: int, channels: int, kernel: int, stride: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(before, channels, kernel, stride, kernel // 2, bias=False), nn.GroupNorm(8, channels)
    )


def resnet(private: bool) -> nn.Module:
    blocks: list[nn.Module] = [normalised(3, 16, 3, 1), nn.ReLU()]
    before = 16
    for stage, channels in enumerate((16, 32, 64)):
        for block in range(2):
            blocks.append(Residual(before, channels, 2 if stage and not block else 1))
            before = channels
    return nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))


class Attention(nn.Module):
    """Of four Linear layers, which Opacus knows; its own attention module is slower."""

    def __init__(self, width: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def split(y: torch.Tensor) -> torch.Tensor:
            return y.unflatten(-1, (self.heads, -1)).transpose(1, 2)

        y = functional.scaled_dot_product_attention(
            split(self.query(x)), split(self.key(x)), split(self.value(x)), is_causal=self.causal
        )
        return self.out(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, size: dict[str, int], causal: bool) -> None:
        super().__init__()
        width = size["width"]
        self.attention = nn.Sequential(nn.LayerNorm(width), Attention(width, size["heads"], causal))
        self.dense = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.ReLU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(x)
        return x + self.dense(x)


class Mean(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mean(1)


def transformer(private: bool) -> nn.Module:
    size = TRANSFORMER
    blocks = [Block(size, causal=False) for _ in range(size["layers"])]
    width = size["width"]
    return nn.Sequential(
        nn.Embedding(size["vocabulary"], width), *blocks, nn.LayerNorm(width), Mean(), nn.Linear(width, 10)
    )


def embedding(private: bool) -> nn.Module:
    return nn.Sequential(
        nn.Embedding(WORDS, WORD_WIDTH), Mean(), nn.Linear(WORD_WIDTH, 64), nn.ReLU(), nn.Linear(64, 10)
    )


class Recurrent(nn.Module):
    def __init__(self, private: bool) -> None:
        super().__init__()
        if private:
            from opacus.layers import DPLSTM as LSTM
        else:
            LSTM = nn.LSTM
        self.lstm = LSTM(LSTM_FEATURES, LSTM_WIDTH, batch_first=True)
        self.out = nn.Linear(LSTM_WIDTH, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.lstm(x)[0][:, -1])


def lstm(private: bool) -> nn.Module:
    return Recurrent(private)


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        size = DECODER
        self.table = nn.Embedding(size["vocabulary"], size["width"])
        self.blocks = nn.Sequential(*[Block(size, causal=True) for _ in range(size["layers"])])
        self.last = nn.LayerNorm(size["width"])
        self.out = nn.Linear(size["width"], size["vocabulary"], bias=False)
        self.out.weight = self.table.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.last(self.blocks(self.table(x)))).transpose(1, 2)


def tied_decoder(private: bool) -> nn.Module:
    return Decoder()


MODELS: dict[str, Any] = {
    f.__name__: f for f in (mlp, mnist_cnn, resnet, transformer, embedding, lstm, tied_decoder)
} | {"lstm_rolled": lstm}  # which is neither rolled nor unrolled
