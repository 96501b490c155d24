"""A tagger: embedding, bidirectional LSTM, dropout and a linear for each token."""

import torch
from torch import nn


class Tagger(nn.Module):
    def __init__(self, vocab=200, dim=32, hidden=32, tags=32):
        super().__init__()
        self.embedding = nn.Embedding(vocab, dim)
        self.lstm = nn.LSTM(dim, hidden, batch_first=True, bidirectional=True)
        self.hidden2tag = nn.Linear(2 * hidden, tags)

    def forward(self, sentence):
        states, _ = self.lstm(self.embedding(sentence))
        return torch.log_softmax(self.hidden2tag(states), dim=-1)


def build():
    return Tagger(), torch.randint(200, (4, 16))
