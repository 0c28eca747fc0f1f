"""Oracle: local SGD with parameter averaging in plain torch, node after node, without code of aedit."""

import copy

import torch


def local_sgd(model, batches, loss, every, lr=0.1, *, train=None):
    """Return the parameters after nodes averaged every `every` steps and at the end.

    batches: one list per node. A node without a step in an interval contributes nothing; all nodes take the
    mean, in fp32. train: takes one step, `train(model, optimizer, batch)`, in place of a plain one.
    """

    def plain(model, optimizer, batch):
        optimizer.zero_grad()
        loss(model, batch).backward()
        optimizer.step()

    replicas = [copy.deepcopy(model) for _ in batches]
    inner = [torch.optim.SGD(replica.parameters(), lr=lr) for replica in replicas]
    anchors = {name: p.detach().float() for name, p in trainable(model)}
    for start in range(0, max(map(len, batches)), every):
        moved = []
        for replica, optimizer, mine in zip(replicas, inner, batches, strict=True):
            for batch in mine[start : start + every]:
                (train or plain)(replica, optimizer, batch)
            if mine[start : start + every]:
                moved.append({name: p.detach().float() for name, p in trainable(replica)})
        begun = {name: p.to(dict(trainable(model))[name].dtype).float() for name, p in anchors.items()}
        for name in anchors:
            anchors[name] = anchors[name] + sum(end[name] - begun[name] for end in moved) / len(moved)
        for replica in replicas:
            for name, p in trainable(replica):
                p.data.copy_(anchors[name])
    return {name: p.detach().clone() for name, p in trainable(replicas[0])}


def trainable(model):
    return [(name, p) for name, p in model.named_parameters() if p.requires_grad]


def furthest(found, expected):
    """Return the largest absolute difference between two dictionaries of tensors with the same names."""
    assert found.keys() == expected.keys()
    return max((found[name].float() - expected[name].float()).abs().max().item() for name in expected)
