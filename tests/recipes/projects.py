"""Models and losses as whole projects have them."""

import math

import torch
import torch.nn.functional as F
from torch import nn

from recipes.data import tokens
from recipes.recipe import Training, recipe


def generator(seed=1):
    return torch.Generator().manual_seed(seed)


@recipe("projects", "an encoder of packed sequences and an attention decoder")
def seq2seq(job):
    """Teacher forcing that the loop decides, two optimizers, -inf in scores, tokens that are fed back."""

    class Enc(nn.Module):
        def __init__(self):
            super().__init__()
            self.e = nn.Embedding(11, 8, padding_idx=0)
            self.rnn = nn.GRU(8, 8, batch_first=True)

        def forward(self, s, lengths):
            p = nn.utils.rnn.pack_padded_sequence(self.e(s), lengths, batch_first=True, enforce_sorted=False)
            o, h = self.rnn(p)
            o, _ = nn.utils.rnn.pad_packed_sequence(o, batch_first=True, total_length=s.size(1))
            return o, h

    class Dec(nn.Module):
        def __init__(self):
            super().__init__()
            self.e = nn.Embedding(11, 8)
            self.attn = nn.Linear(16, 1)
            self.cell = nn.GRUCell(16, 8)
            self.out = nn.Linear(8, 11)

        def forward(self, tok, h, enc, mask):
            e = self.e(tok)
            s = (
                self.attn(torch.cat([enc, h.unsqueeze(1).expand_as(enc)], -1))
                .squeeze(-1)
                .masked_fill(~mask, float("-inf"))
            )
            c = torch.bmm(s.softmax(-1).unsqueeze(1), enc).squeeze(1)
            h = self.cell(torch.cat([e, c], -1), h)
            return self.out(h), h

    enc, dec = Enc(), Dec()
    opts = [torch.optim.Adam(enc.parameters(), 1e-2), torch.optim.Adam(dec.parameters(), 1e-2)]
    crit = nn.CrossEntropyLoss(ignore_index=0)
    lengths = [6, 5, 5, 3, 6, 4, 2, 6]

    @job
    def step(src, tgt, use_tf):
        mask = torch.arange(6)[None] < torch.tensor(lengths)[:, None]
        enc_o, h = enc(src, lengths)
        h = h.squeeze(0)
        tok = torch.ones(src.size(0), dtype=torch.long)
        loss = 0
        for t in range(tgt.size(1)):
            logits, h = dec(tok, h, enc_o, mask)
            loss = loss + crit(logits, tgt[:, t])
            tok = tgt[:, t] if use_tf else logits.argmax(-1)
        for o in opts:
            o.zero_grad()
        loss.backward()
        for o in opts:
            o.step()
        return loss / tgt.size(1)

    return Training(
        {"enc": enc, "dec": dec},
        opts,
        step,
        [(*b, i % 2 == 0) for i, b in enumerate(tokens(6, 11, steps=5))],
    )


@recipe("projects", "a tagger with a conditional random field")
def crf(job):
    """The forward algorithm and Viterbi paths in Python loops, scores by pairs of indices."""

    class CRF(nn.Module):
        def __init__(self, n):
            super().__init__()
            self.s, self.e, self.t = (
                nn.Parameter(torch.randn(n) * 0.1),
                nn.Parameter(torch.randn(n) * 0.1),
                nn.Parameter(torch.randn(n, n) * 0.1),
            )

        def forward(self, em, tags, mask):
            b, L, _n = em.shape
            ar = torch.arange(b)
            sc = self.s[tags[:, 0]] + em[ar, 0, tags[:, 0]]
            for i in range(1, L):
                sc = sc + (self.t[tags[:, i - 1], tags[:, i]] + em[ar, i, tags[:, i]]) * mask[:, i]
            last = mask.long().sum(1) - 1
            sc = sc + self.e[tags[ar, last]]
            a = self.s + em[:, 0]
            for i in range(1, L):
                nx = torch.logsumexp(a.unsqueeze(2) + self.t + em[:, i].unsqueeze(1), dim=1)
                a = torch.where(mask[:, i].unsqueeze(1), nx, a)
            return -(sc - torch.logsumexp(a + self.e, 1)).mean()

        def decode(self, em):
            s = self.s + em[:, 0]
            hist = []
            for i in range(1, em.shape[1]):
                v, ix = (s.unsqueeze(2) + self.t + em[:, i].unsqueeze(1)).max(1)
                s = v
                hist.append(ix)
            best = (s + self.e).argmax(1)
            path = [best]
            for h in reversed(hist):
                best = h.gather(1, best.unsqueeze(1)).squeeze(1)
                path.append(best)
            return torch.stack(path[::-1], 1)

    e, lstm, o, c = nn.Embedding(11, 6), nn.LSTM(6, 4, bidirectional=True, batch_first=True), nn.Linear(8, 4), CRF(4)
    opt = torch.optim.Adam([*e.parameters(), *lstm.parameters(), *o.parameters(), *c.parameters()], 0.01)

    @job
    def step(x, tags, mask):
        em = o(lstm(e(x))[0])
        loss = c(em, tags, mask)
        opt.zero_grad()
        loss.backward()
        opt.step()
        return loss

    @job(type="predict")
    def dec(x):
        return c.decode(o(lstm(e(x))[0]))

    def run(x, t, m):
        return step(x, t, m), dec(x)

    g = generator()
    return Training(
        {"e": e, "l": lstm, "o": o, "c": c},
        opt,
        run,
        [
            (
                torch.randint(11, (8, 6), generator=g),
                torch.randint(4, (8, 6), generator=g),
                torch.arange(6) < torch.randint(2, 7, (8, 1), generator=g),
            )
            for _ in range(3)
        ],
    )


@recipe("projects", "forecasting with an LSTM and a likelihood")
def deepar(job):
    """Scaled series, a Normal, and a predict job that feeds its forecasts back."""

    class DeepAR(nn.Module):
        def __init__(self):
            super().__init__()
            self.l = nn.LSTM(2, 8, 2, batch_first=True)
            self.mu, self.s = nn.Linear(8, 1), nn.Linear(8, 1)

        def forward(self, z, cov, st=None):
            h, st = self.l(torch.stack([z, cov], -1), st)
            return self.mu(h).squeeze(-1), F.softplus(self.s(h)).squeeze(-1) + 1e-3, st

    m = DeepAR()
    opt = torch.optim.Adam(m.parameters(), 1e-2)

    @job
    def step(z, cov):
        nu = 1 + z.abs().mean(1, keepdim=True)
        x = z / nu
        mu, s, _ = m(x[:, :-1], cov[:, 1:])
        d = torch.distributions.Normal(mu, s)
        loss = -d.log_prob(x[:, 1:]).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        return loss

    @job(type="predict")
    def forecast(z, cov):
        nu = 1 + z.abs().mean(1, keepdim=True)
        mu, _s, st = m(z / nu, cov)
        x = mu[:, -1:]
        out = []
        for _ in range(3):
            out.append(x * nu)
            x, _s, st = m(x, cov[:, -1:], st)
        return torch.cat(out, 1)

    def run(z, cov):
        return step(z, cov), forecast(z, cov)

    g = generator(2)
    return Training(m, opt, run, [(torch.randn(8, 10, generator=g), torch.randn(8, 10, generator=g)) for _ in range(4)])


@recipe("projects", "a click model of embedding bags and their products")
def dlrm(job):
    """nn.EmbeddingBag for each field, bmm, and the lower triangle by lists of indices."""

    class DLRM(nn.Module):
        def __init__(self):
            super().__init__()
            self.bot = nn.Sequential(nn.Linear(4, 8), nn.ReLU())
            self.emb = nn.ModuleList(nn.EmbeddingBag(n, 8, mode="sum") for n in (10, 20, 30))
            self.top = nn.Sequential(nn.Linear(8 + 6, 8), nn.ReLU(), nn.Linear(8, 1))

        def forward(self, d, s):
            x = self.bot(d)
            ly = [e(s[:, i]) for i, e in enumerate(self.emb)]
            T = torch.cat([x, *ly], 1).view(len(x), -1, 8)
            Z = torch.bmm(T, T.transpose(1, 2))
            _, ni, nj = Z.shape
            li = torch.tensor([i for i in range(ni) for j in range(i)])
            lj = torch.tensor([j for i in range(nj) for j in range(i)])
            return self.top(torch.cat([x, Z[:, li, lj]], 1))

    m = DLRM()
    opt = torch.optim.Adagrad(m.parameters(), 0.05)
    g = generator(2)

    @job
    def step(d, s, y):
        out = m(d, s)
        loss = nn.BCEWithLogitsLoss()(out.view(-1), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        return loss

    return Training(
        m,
        opt,
        step,
        [
            (
                torch.rand(8, 4, generator=g).log1p(),
                torch.randint(10, (8, 3, 4), generator=g),
                torch.randint(2, (8,), generator=g).double(),
            )
            for _ in range(4)
        ],
    )


@recipe("projects", "knowledge tracing with attention")
def tracing(job):
    """masked_select of predictions and answers, BCE and accuracy of those alone."""

    class KT(nn.Module):
        def __init__(self):
            super().__init__()
            self.e = nn.Embedding(21, 8, padding_idx=0)
            self.q = nn.Embedding(11, 8, padding_idx=0)
            self.a = nn.MultiheadAttention(8, 2, batch_first=True)
            self.norm = nn.LayerNorm(8)
            self.o = nn.Linear(8, 1)

        def forward(self, q, r, qn):
            x = self.e(q + 10 * r * (q > 0))
            qe = self.q(qn)
            m = torch.triu(torch.ones(q.size(1), q.size(1)), diagonal=1).bool()
            h, _w = self.a(qe, x, x, attn_mask=m)
            return torch.sigmoid(self.o(self.norm(h + qe))).squeeze(-1)

    m = KT()
    opt = torch.optim.Adam(m.parameters(), 1e-2)
    g = generator(9)

    def b():
        q = torch.randint(1, 11, (8, 7), generator=g)
        found = torch.randint(3, 8, (8, 1), generator=g)
        q = q * (torch.arange(7) < found)
        return q, torch.randint(0, 2, (8, 7), generator=g)

    @job
    def step(q, r):
        p = m(q[:, :-1], r[:, :-1], q[:, 1:])
        mask = q[:, 1:] != 0
        y = torch.masked_select(p, mask)
        t = torch.masked_select(r[:, 1:], mask)
        loss = F.binary_cross_entropy(y, t.to(y.dtype))
        opt.zero_grad()
        loss.backward()
        opt.step()
        acc = ((y > 0.5) == (t > 0.5)).to(y.dtype).mean()
        return loss, acc

    return Training(m, opt, step, [b() for _ in range(4)])


@recipe("projects", "a detector with focal loss")
def retina(job):
    """Anchors that count by two masks, sums divided by max(1, positive.sum()), a prior in the bias."""

    class Head(nn.Module):
        def __init__(self):
            super().__init__()
            self.back = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.ReLU())
            self.cls = nn.Conv2d(8, 2 * 3, 3, padding=1)
            self.reg = nn.Conv2d(8, 2 * 4, 3, padding=1)
            nn.init.constant_(self.cls.bias, -math.log((1 - 0.01) / 0.01))

        def forward(self, x):
            f = self.back(x)
            n, _, h, w = f.shape
            c = self.cls(f).view(n, 2, 3, h, w).permute(0, 3, 4, 1, 2).reshape(n, -1, 3)
            b = self.reg(f).view(n, 2, 4, h, w).permute(0, 3, 4, 1, 2).reshape(n, -1, 4)
            return c, b

    model = Head()
    opt = torch.optim.SGD(model.parameters(), 0.02, momentum=0.9, nesterov=True)
    g = generator(9)
    batches = [
        (
            torch.randn(8, 3, 4, 4, generator=g),
            torch.randint(-1, 4, (8, 32), generator=g),
            torch.randn(8, 32, 4, generator=g),
        )
        for _ in range(4)
    ]

    @job
    def step(img, labels, boxes):
        c, b = model(img)
        valid = labels >= 0
        pos = labels > 0
        num_pos = pos.sum().clamp(min=1)
        tgt = F.one_hot(labels.clamp(min=0), 4)[..., 1:].to(c.dtype)
        p = torch.sigmoid(c[valid])
        t = tgt[valid]
        ce = F.binary_cross_entropy_with_logits(c[valid], t, reduction="none")
        pt = p * t + (1 - p) * (1 - t)
        fl = ((0.25 * t + 0.75 * (1 - t)) * (1 - pt) ** 2 * ce).sum() / num_pos
        bl = F.smooth_l1_loss(b[pos], boxes[pos], reduction="sum", beta=0.1) / max(1, pos.sum())
        loss = fl + bl
        opt.zero_grad()
        loss.backward()
        opt.step()
        return loss, num_pos

    return Training(model, opt, step, batches)


@recipe("projects", "a set of boxes by a transformer")
def detr(job):
    """Matched queries by scatter and gather, generalised IoU over what a mask leaves, a count by .item()."""
    tr = nn.Transformer(8, 2, 1, 1, 16, dropout=0.0, batch_first=True)
    q = nn.Embedding(5, 8)
    c, b = nn.Linear(8, 4), nn.Linear(8, 4)
    ins = nn.Linear(6, 8)
    ps = [p for m in (tr, q, c, b, ins) for p in m.parameters()]
    opt = torch.optim.AdamW(ps, 1e-3)

    def xyxy(t):
        x, y, w, h = t.unbind(-1)
        return torch.stack([x - w / 2, y - h / 2, x + w / 2, y + h / 2], -1)

    def giou(a, b):
        lt, rb = torch.max(a[..., :2], b[..., :2]), torch.min(a[..., 2:], b[..., 2:])
        wh = (rb - lt).clamp(min=0)
        i = wh[..., 0] * wh[..., 1]

        def ar(z):
            return (z[..., 2] - z[..., 0]) * (z[..., 3] - z[..., 1])

        u = ar(a) + ar(b) - i
        e = torch.max(a[..., 2:], b[..., 2:]) - torch.min(a[..., :2], b[..., :2])
        ea = e[..., 0] * e[..., 1]
        return i / u - (ea - u) / ea

    @job
    def step(x, idx, labels, boxes, valid):
        h = tr(ins(x), q.weight.unsqueeze(0).expand(x.size(0), -1, -1))
        logits, bx = c(h), b(h).sigmoid()
        tgt = torch.full(logits.shape[:2], 3, dtype=torch.long)
        tgt = tgt.scatter(1, idx, torch.where(valid, labels, 3))
        w = torch.ones(4)
        w[-1] = 0.1
        lc = F.cross_entropy(logits.transpose(1, 2), tgt, w)
        mb = bx.gather(1, idx[..., None].expand(-1, -1, 4))
        n = valid.sum().clamp(min=1).item()
        l1 = F.l1_loss(mb, boxes, reduction="none")[valid].sum() / n
        lg = (1 - giou(xyxy(mb), xyxy(boxes)))[valid].sum() / n
        loss = lc + 5 * l1 + 2 * lg
        opt.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(ps, 0.1)
        opt.step()
        return loss

    g = generator()
    return Training(
        {"ins": ins, "tr": tr, "q": q, "c": c, "b": b},
        opt,
        step,
        [
            (
                torch.randn(8, 7, 6, generator=g),
                torch.stack([torch.randperm(5, generator=g)[:3] for _ in range(8)]),
                torch.randint(3, (8, 3), generator=g),
                torch.rand(8, 3, 4, generator=g) * 0.5 + 0.2,
                torch.rand(8, 3, generator=g) < 0.6,
            )
            for _ in range(3)
        ],
        uncalled=("q",),
    )


@recipe("projects", "prototypes by a mask of each class")
def prototypes(job):
    """z[y == c].mean(0), distances to all of them."""
    m = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 6))
    opt = torch.optim.Adam(m.parameters(), 0.01)

    @job
    def step(x, y):
        z = m(x)
        protos = torch.stack([z[y == c].mean(0) for c in range(2)])
        loss = F.cross_entropy(-torch.cdist(z, protos), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        return loss

    g = generator()
    return Training(
        m,
        opt,
        step,
        [(torch.randn(8, 6, generator=g), torch.tensor([0, 1] * 4)[torch.randperm(8, generator=g)]) for _ in range(4)],
    )


@recipe("projects", "token classification with active logits")
def active(job):
    """A transformer of the transformers library, logits.view(-1, n)[active] beside an ignored label."""
    import transformers

    m = transformers.DistilBertModel(
        transformers.DistilBertConfig(
            vocab_size=31,
            dim=8,
            n_layers=1,
            n_heads=2,
            hidden_dim=16,
            max_position_embeddings=16,
            dropout=0.0,
            attention_dropout=0.0,
        )
    )
    h = nn.Linear(8, 4)
    opt = torch.optim.AdamW([*m.parameters(), *h.parameters()], 1e-2)

    @job
    def step(ids, att, labels):
        seq = m(ids, attention_mask=att).last_hidden_state
        logits = h(seq)
        active = att.view(-1) == 1
        loss = nn.CrossEntropyLoss()(logits.view(-1, 4)[active], labels.view(-1)[active])
        alt = torch.where(active, labels.view(-1), torch.tensor(-100).type_as(labels))
        loss2 = nn.CrossEntropyLoss()(logits.view(-1, 4), alt)
        opt.zero_grad()
        (loss + loss2).backward()
        opt.step()
        return loss, loss2

    g = generator()

    def b():
        return (
            torch.randint(1, 31, (8, 7), generator=g),
            (torch.arange(7) < torch.randint(3, 8, (8, 1), generator=g)).long(),
            torch.randint(4, (8, 7), generator=g),
        )

    return Training({"m": m, "h": h}, opt, step, [b() for _ in range(3)])
