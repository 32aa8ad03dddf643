"""Networks of images."""

import torch
import torch.nn.functional as F
from torch import nn

from recipes.data import numbers, pairs, pictures
from recipes.recipe import Training, recipe

ORDER = "batch norm sees one micro-batch at a time, so that two are another training"


def classifier(job, model, optimizer, batches):
    """Cross entropy, as most scripts have it."""

    @job
    def train_step(images, labels):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        return loss

    return Training(model, optimizer, train_step, batches)


@recipe("vision", "a CNN with batch norm", whole=ORDER)
def cnn(job):
    """Convolutions, batch norm with its statistics, max pooling, momentum."""
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8, momentum=0.3), nn.ReLU(), nn.AdaptiveAvgPool2d(1),
        nn.Flatten(), nn.Linear(8, 4),
    )  # fmt: skip
    return classifier(job, model, torch.optim.SGD(model.parameters(), 0.1, momentum=0.9), pictures())


class Residual(nn.Module):
    def __init__(self, inside, out, stride):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(inside, out, 3, stride, 1), nn.GroupNorm(2, out), nn.ReLU(), nn.Conv2d(out, out, 3, 1, 1)
        )
        self.skip = nn.Conv2d(inside, out, 1, stride) if stride > 1 or inside != out else nn.Identity()

    def forward(self, x):
        return F.relu(self.body(x) + self.skip(x))


@recipe("vision", "a residual network with group norm")
def resnet(job):
    """Residual blocks, strides, shortcuts, weight decay on kernels alone."""
    model = nn.Sequential(Residual(3, 8, 1), Residual(8, 8, 2), nn.Flatten(), nn.Linear(128, 4))
    groups = [
        {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.ndim == 1], "weight_decay": 0.0},
    ]
    return classifier(job, model, torch.optim.AdamW(groups, lr=1e-2, eps=1e-5), pictures())


class ChannelsLast(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.depthwise = nn.Conv2d(dim, dim, 5, padding=2, groups=dim)
        self.norm = nn.LayerNorm(dim)
        self.up, self.down = nn.Linear(dim, 2 * dim), nn.Linear(2 * dim, dim)
        self.scale = nn.Parameter(torch.full((dim,), 0.1))

    def forward(self, x):
        y = self.depthwise(x).permute(0, 2, 3, 1)
        y = self.scale * self.down(F.gelu(self.up(self.norm(y))))
        return x + y.permute(0, 3, 1, 2)


@recipe("vision", "ConvNeXt blocks")
def convnext(job):
    """Depthwise convolutions, layer norm over channels, permuted views, layer scale."""
    stem = nn.Conv2d(3, 8, 2, stride=2)
    model = nn.Sequential(
        stem, ChannelsLast(8), ChannelsLast(8), nn.AdaptiveAvgPool2d(1), nn.Flatten(1), nn.Linear(8, 4)
    )
    return classifier(job, model, torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-5), pictures())


class Squeeze(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.fc1, self.fc2 = nn.Conv2d(dim, dim // 4, 1), nn.Conv2d(dim // 4, dim, 1)

    def forward(self, x):
        s = x.mean((2, 3), keepdim=True)
        return x * torch.sigmoid(self.fc2(F.silu(self.fc1(s))))


@recipe("vision", "inverted bottlenecks with squeeze and excitation", whole=ORDER)
def mobilenet(job):
    """Grouped convolutions, hard swish, gates by channel, batch norm without affine."""
    model = nn.Sequential(
        nn.Conv2d(3, 8, 1, bias=False), nn.BatchNorm2d(8, affine=False), nn.Hardswish(),
        nn.Conv2d(8, 8, 3, padding=1, groups=4), Squeeze(8), nn.Conv2d(8, 4, 1), nn.ReLU6(),
        nn.Flatten(), nn.Linear(256, 4),
    )  # fmt: skip
    return classifier(job, model, torch.optim.RMSprop(model.parameters(), 1e-3, momentum=0.9), pictures())


class UNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.down1, self.down2 = nn.Conv2d(1, 4, 3, padding=1), nn.Conv2d(4, 8, 3, stride=2, padding=1)
        self.middle = nn.Sequential(nn.InstanceNorm2d(8, affine=True), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1))
        self.up = nn.ConvTranspose2d(8, 4, 2, stride=2)
        self.out = nn.Conv2d(8, 1, 1)

    def forward(self, x):
        a = F.relu(self.down1(x))
        b = self.middle(self.down2(a))
        return self.out(torch.cat([a, self.up(b)], 1))


@recipe("vision", "a U-Net with Dice loss")
def unet(job):
    """Transposed convolutions, concatenated skips, instance norm, a loss of sums over the image."""
    model = UNet()
    optimizer = torch.optim.Adam(model.parameters(), 1e-2, eps=1e-5)

    @job
    def train_step(images):
        masks = (images > 0).to(images.dtype)
        p = torch.sigmoid(model(images + 0.1))
        dice = 1 - (2 * (p * masks).sum((1, 2, 3)) + 1) / (p.sum((1, 2, 3)) + masks.sum((1, 2, 3)) + 1)
        loss = dice.mean() + F.binary_cross_entropy(p, masks)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return Training(model, optimizer, train_step, numbers(1, 8, 8))


class ViT(nn.Module):
    def __init__(self, dim=8):
        super().__init__()
        self.patch = nn.Conv2d(3, dim, 4, stride=4)
        self.token = nn.Parameter(torch.zeros(1, 1, dim))
        self.positions = nn.Parameter(0.02 * torch.randn(1, 5, dim))
        layer = nn.TransformerEncoderLayer(
            dim, 2, 16, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(dim, 4)

    def forward(self, images):
        x = self.patch(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.positions
        return self.head(self.encoder(x)[:, 0])


@recipe("vision", "a vision transformer")
def vit(job):
    """Patches, a class token that is expanded, learnt positions, nn.TransformerEncoder."""
    model = ViT()
    return classifier(job, model, torch.optim.AdamW(model.parameters(), 1e-2, eps=1e-4), pictures())


@recipe("vision", "an MLP-Mixer")
def mixer(job):
    """Linear layers over patches and over channels in turn, einops by hand."""

    class Mixer(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Linear(48, 8)
            self.across = nn.ModuleList(nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4)) for _ in range(2))
            self.within = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8)) for _ in range(2))
            self.norms = nn.ModuleList(nn.LayerNorm(8) for _ in range(2))
            self.head = nn.Linear(8, 4)

        def forward(self, x):
            n = x.shape[0]
            x = x.reshape(n, 3, 2, 4, 2, 4).permute(0, 2, 4, 1, 3, 5).reshape(n, 4, 48)
            x = self.embed(x)
            for norm, across, within in zip(self.norms, self.across, self.within, strict=True):
                x = x + across(norm(x).mT).mT
                x = x + within(x)
            return self.head(x.mean(1))

    model = Mixer()
    return classifier(job, model, torch.optim.Adam(model.parameters(), 1e-2, eps=1e-4), pictures())


@recipe("vision", "boxes with smooth L1 and a class head")
def detector(job):
    """Two heads of one backbone, anchors as a buffer, a loss for those labelled as objects only, by multiplication."""

    class Detector(nn.Module):
        def __init__(self):
            super().__init__()
            self.backbone = nn.Sequential(nn.Conv2d(3, 8, 3, stride=2, padding=1), nn.LeakyReLU(0.1))
            self.boxes, self.labels = nn.Conv2d(8, 4, 1), nn.Conv2d(8, 3, 1)
            self.register_buffer("anchors", torch.linspace(0, 1, 16).view(16, 1).repeat(1, 4))

        def forward(self, x):
            h = self.backbone(x)
            boxes = self.boxes(h).flatten(2).transpose(1, 2) + self.anchors
            return boxes, self.labels(h).flatten(2).transpose(1, 2)

    model = Detector()
    optimizer = torch.optim.SGD(model.parameters(), 0.05, nesterov=True, momentum=0.9)

    @job
    def train_step(images, labels):
        optimizer.zero_grad()
        boxes, logits = model(images)
        there = (labels > 1).to(images.dtype)[:, None].expand(-1, 16)
        where = F.smooth_l1_loss(boxes, torch.ones_like(boxes) / 2, reduction="none").sum(-1)
        where = (where * there).sum() / there.sum().clamp(min=1)
        what = F.cross_entropy(logits.flatten(0, 1), (labels % 3).repeat_interleave(16))
        (where + what).backward()
        optimizer.step()
        return {"boxes": where, "classes": what}

    return Training(model, optimizer, train_step, pictures())


@recipe("vision", "super-resolution by pixel shuffling")
def superres(job):
    """PixelShuffle, bicubic interpolation beside it, a Charbonnier loss, PReLU."""
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1, padding_mode="reflect"), nn.PReLU(8), nn.Conv2d(8, 4, 3, padding=1),
        nn.PixelShuffle(2),
    )  # fmt: skip
    optimizer = torch.optim.Adam(model.parameters(), 1e-2, eps=1e-5)

    @job
    def train_step(large):
        small = F.avg_pool2d(large, 2)
        made = model(small) + F.interpolate(small, scale_factor=2, mode="bicubic")
        loss = ((made - large) ** 2 + 1e-3).sqrt().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return Training(model, optimizer, train_step, numbers(1, 8, 8))


@recipe("vision", "a spatial transformer")
def spatial(job):
    """affine_grid and grid_sample with gradients of the grid."""

    class Spatial(nn.Module):
        def __init__(self):
            super().__init__()
            self.where = nn.Linear(64, 6)
            nn.init.zeros_(self.where.weight)
            with torch.no_grad():
                self.where.bias.copy_(torch.tensor([1.0, 0.1, 0, 0, 0.9, 0]))
            self.head = nn.Linear(64, 8)

        def forward(self, x):
            theta = self.where(x.flatten(1)).view(-1, 2, 3)
            x = F.grid_sample(x, F.affine_grid(theta, x.shape, align_corners=False), align_corners=False)
            return self.head(x.flatten(1))

    model = Spatial()
    optimizer = torch.optim.SGD(model.parameters(), 0.05)

    @job
    def train_step(images):
        loss = model(images).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return Training(model, optimizer, train_step, numbers(1, 8, 8))


@recipe("vision", "a video network of 3-D convolutions")
def video(job):
    """Conv3d, pooling over time, a convolution of signals beside it."""
    model = nn.ModuleDict({
        "frames": nn.Conv3d(1, 4, (2, 3, 3), padding=(0, 1, 1)),
        "sound": nn.Conv1d(1, 4, 3, dilation=2),
        "head": nn.Linear(8, 1),
    })  # fmt: skip
    optimizer = torch.optim.Adagrad(model.parameters(), 0.05)

    @job
    def train_step(frames):
        seen = F.max_pool3d(F.elu(model["frames"](frames)), (2, 2, 2)).mean((2, 3, 4))
        heard = F.selu(model["sound"](frames.mean((3, 4)).repeat(1, 1, 3))).amax(-1)
        loss = F.softplus(model["head"](torch.cat([seen, heard], -1))).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return Training(model, optimizer, train_step, numbers(1, 3, 4, 4))


@recipe("vision", "mixup and cutmix")
def mixup(job):
    """Weights and a permutation that the loop draws, a box that is cut out by a mask, soft targets."""
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Tanh(), nn.Flatten(), nn.Linear(144, 4))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    generator = torch.Generator().manual_seed(7)

    @job
    def train_step(images, labels, order, weight, box):
        images = torch.where(box, images[order], images)
        mixed = weight * images + (1 - weight) * images[order]
        logits = model(mixed)
        soft = weight * F.one_hot(labels, 4) + (1 - weight) * F.one_hot(labels[order], 4)
        loss = F.cross_entropy(logits, soft) + F.cross_entropy(logits, labels) * 0.1
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    def run(images, labels):
        box = torch.zeros(1, 1, 8, 8, dtype=torch.bool)
        box[..., 2:5, 1:6] = True
        return train_step(
            images, labels, torch.randperm(8, generator=generator), torch.rand((), generator=generator), box
        )

    return Training(model, optimizer, run, pictures())


@recipe("vision", "a masked autoencoder")
def masked_autoencoder(job):
    """Patches taken by gather, a mask token where others were, put back by the inverse permutation."""

    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.encode, self.decode = nn.Linear(16, 8), nn.Linear(8, 16)
            self.positions = nn.Parameter(torch.randn(4, 8) / 10)
            self.token = nn.Parameter(torch.zeros(8))

        def forward(self, patches, order):
            x = self.encode(patches) + self.positions
            kept = torch.gather(x, 1, order[:, :2, None].expand(-1, -1, 8))
            x = torch.cat([torch.tanh(kept), self.token.expand(len(x), 2, -1)], 1)
            x = torch.gather(x, 1, order.argsort(1)[..., None].expand(-1, -1, 8))
            return self.decode(x + self.positions)

    model = Masked()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2, eps=1e-5)

    @job
    def train_step(patches, order):
        gone = order.argsort(1) >= 2
        error = (model(patches, order) - patches).square().mean(-1)
        loss = (error * gone).sum() / gone.sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    g = torch.Generator().manual_seed(8)
    batches = [(*b, torch.rand(8, 4, generator=g).argsort(1)) for b in numbers(4, 16)]
    return Training(model, optimizer, train_step, batches)


@recipe("vision", "style transfer by Gram matrices")
def style(job):
    """A frozen network's features, batched outer products, a total variation penalty."""
    frozen = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3)).requires_grad_(False)
    model = nn.Conv2d(3, 3, 3, padding=1)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2, eps=1e-5)

    def gram(x):
        x = x.flatten(2)
        return x @ x.mT / x[0].numel()

    @job
    def train_step(images, labels):
        made = model(images)
        variation = (made[..., 1:] - made[..., :-1]).abs().mean() + made.diff(dim=2).abs().mean()
        with torch.no_grad():
            wanted = gram(frozen(images.flip(0)))
        loss = F.mse_loss(gram(frozen(made)), wanted) + 0.01 * variation
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss, variation

    return Training({"model": model, "frozen": frozen}, optimizer, train_step, pictures())


@recipe("vision", "keypoints from heat maps")
def keypoints(job):
    """A soft argmax over coordinates that are made in the forward pass, unfold, and a wing loss."""
    model = nn.Conv2d(9, 2, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    @job
    def train_step(images, targets):
        windows = F.unfold(images.view(-1, 1, 6, 6), 3).view(-1, 9, 4, 4)
        heat = model(windows).flatten(2).softmax(-1)
        y, x = torch.meshgrid(torch.arange(4.0), torch.arange(4.0), indexing="ij")
        found = torch.stack([(heat * x.flatten()).sum(-1), (heat * y.flatten()).sum(-1)], -1)
        gap = (found.flatten(1) - targets).abs()
        loss = torch.where(gap < 1, torch.log1p(2 * gap), gap + 0.1).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return Training(model, optimizer, train_step, pairs(36, 4))
