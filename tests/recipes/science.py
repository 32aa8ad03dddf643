"""Differential equations, kernels, Fourier transforms and linear algebra."""

import torch
import torch.nn.functional as F
from torch import nn

from recipes.data import numbers, pairs
from recipes.recipe import Training, recipe


def training(job, model, loss_of, batches, optimizer=None):
    """One step of Adam on a loss of the model and the batch."""
    optimizer = optimizer or torch.optim.Adam(model.parameters(), 1e-2, eps=1e-5)

    @job
    def train_step(*batch):
        optimizer.zero_grad()
        loss = loss_of(model, *batch)
        loss.backward()
        optimizer.step()
        return loss

    return Training(model, optimizer, train_step, batches)


def derivative(y, x):
    return torch.autograd.grad(y, x, torch.ones_like(y), create_graph=True)[0]


@recipe("science", "a physics-informed network")
def pinn(job):
    """The heat equation: second derivatives of a network in a loss, with boundary terms."""
    model = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))

    def loss(model, points):
        x, t = points[:, :1].requires_grad_(), points[:, 1:].requires_grad_()
        u = model(torch.cat([x, t], -1))
        residual = derivative(u, t) - 0.1 * derivative(derivative(u, x), x)
        start = model(torch.cat([x, torch.zeros_like(t)], -1)) - torch.sin(x)
        return residual.square().mean() + start.square().mean()

    return training(job, model, loss, numbers(2))


@recipe("science", "a Hamiltonian network")
def hamiltonian(job):
    """A field that is the gradient of an energy, integrated by leapfrog steps."""
    model = nn.Sequential(nn.Linear(2, 8), nn.Softplus(), nn.Linear(8, 1))

    def loss(model, state, wanted):
        q, p = state.detach().requires_grad_().chunk(2, -1)
        for _ in range(2):
            p = p - 0.1 * derivative(model(torch.cat([q, p], -1)).sum(), q)
            q = q + 0.1 * derivative(model(torch.cat([q, p], -1)).sum(), p)
        return F.mse_loss(torch.cat([q, p], -1), wanted)

    return training(job, model, loss, pairs(2, 2))


@recipe("science", "a neural ordinary differential equation")
def ode(job):
    """Runge-Kutta of fourth order in a Python loop, the state at each time in the loss."""

    class Field(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))

        def forward(self, t, y):
            return self.net(torch.cat([y, torch.full_like(y[:, :1], t)], -1))

    def loss(field, y):
        path, h = [], 0.25
        for i in range(3):
            t = i * h
            a = field(t, y)
            b = field(t + h / 2, y + h / 2 * a)
            c = field(t + h / 2, y + h / 2 * b)
            d = field(t + h, y + h * c)
            y = y + h / 6 * (a + 2 * b + 2 * c + d)
            path.append(y)
        return (torch.stack(path) - 1).square().mean()

    return training(job, Field(), loss, numbers(3))


@recipe("science", "a Fourier neural operator")
def fno(job):
    """rfft, complex weights, einsum of complex numbers, irfft."""

    class Spectral(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 4, 3, dtype=torch.complex128) / 4)
            self.beside = nn.Conv1d(4, 4, 1)

        def forward(self, x):
            modes = torch.fft.rfft(x)
            low = torch.einsum("nim,iom->nom", modes[..., :3], self.weight)
            high = torch.zeros_like(modes[..., 3:])
            return F.gelu(torch.fft.irfft(torch.cat([low, high], -1), n=x.shape[-1]) + self.beside(x))

    model = nn.Sequential(nn.Conv1d(1, 4, 1), Spectral(), Spectral(), nn.Conv1d(4, 1, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    return training(job, model, lambda m, x: F.mse_loss(m(x), x.cumsum(-1)), numbers(1, 8), optimizer)


@recipe("science", "complex numbers as pairs and as numbers")
def complexes(job):
    """view_as_complex, magnitudes and conjugates, a complex linear layer and modReLU."""

    class Complex(nn.Module):
        def __init__(self):
            super().__init__()
            self.real, self.imaginary = nn.Linear(3, 4), nn.Linear(3, 4)
            self.bias = nn.Parameter(torch.full((4,), -0.1))

        def forward(self, z):
            a, b = z.real, z.imag
            w = torch.complex(self.real(a) - self.imaginary(b), self.real(b) + self.imaginary(a))
            size = w.abs()
            return w * F.relu(size + self.bias) / (size + 1e-3)

    def loss(model, x):
        z = torch.view_as_complex(x.view(-1, 3, 2))
        w = model(z)
        return torch.view_as_real(w).square().mean() + (w.conj() * w).real.mean()

    return training(job, Complex(), loss, numbers(6))


@recipe("science", "angles of complex numbers")
def angles(job):
    """A loss of the phase of a Fourier transform."""

    def loss(model, x):
        return torch.cos(torch.fft.rfft(model(x)).angle()).mean()

    return training(job, nn.Linear(6, 6), loss, numbers(6))


@recipe("science", "a spectrogram")
def spectrogram(job):
    """Short Fourier transforms with a window in a buffer, a mel filter bank, log magnitudes."""
    model = nn.ModuleDict({"filters": nn.Linear(5, 4), "head": nn.Linear(4, 2)})
    model.register_buffer("window", torch.hann_window(8))

    def loss(model, wave):
        spectrum = torch.stft(wave, 8, 4, window=model.window, return_complex=True).abs().square()
        mel = torch.log(model["filters"](spectrum.transpose(1, 2)).square() + 1e-3)
        return model["head"](mel.mean(1)).square().mean()

    return training(job, model, loss, numbers(24))


@recipe("science", "a Gaussian process")
def gaussian(job):
    """A kernel over the batch, Cholesky, triangular solves, a log determinant."""
    model = nn.Linear(3, 2)
    model.register_parameter("noise", nn.Parameter(torch.tensor(0.0)))

    def loss(model, x, y):
        z = model(x)
        kernel = torch.exp(-0.5 * (z[:, None] - z[None]).square().sum(-1))
        kernel = kernel + (F.softplus(model.noise) + 0.1) * torch.eye(len(x))
        factor = torch.linalg.cholesky(kernel)
        solved = torch.linalg.solve_triangular(factor, y, upper=False)
        return 0.5 * solved.square().sum() + factor.diagonal().log().sum()

    return training(job, model, loss, pairs(3, 1))


@recipe("science", "least squares within the forward pass")
def closed(job):
    """A ridge regression solved by torch.linalg.solve on learnt features."""
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh())

    def loss(model, x, y):
        h = model(x)
        weights = torch.linalg.solve(h.mT @ h + 0.5 * torch.eye(6), h.mT @ y)
        return F.mse_loss(h @ weights, y)

    return training(job, model, loss, pairs(4, 2))


@recipe("science", "a covariance that is learnt")
def covariance(job):
    """A multivariate normal whose scale is a lower triangle with an exponential diagonal, for each row."""
    model = nn.Linear(4, 9)

    def loss(model, x, y):
        mean, diagonal, below = model(x).split([3, 3, 3], -1)
        factor = torch.diag_embed(F.softplus(diagonal) + 0.1)
        rows, columns = torch.tril_indices(3, 3, -1)
        factor = factor.index_put((torch.arange(len(x))[:, None], rows, columns), below)
        normal = torch.distributions.MultivariateNormal(mean, scale_tril=factor, validate_args=False)
        return -normal.log_prob(y).mean()

    return training(job, model, loss, pairs(4, 3))


@recipe("science", "signal layers of sines and Fourier features")
def siren(job):
    """SIREN with its initialisation, random features in a buffer, a loss of gradients of the network."""

    class Siren(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("frequencies", torch.randn(2, 4))
            self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 1)
            nn.init.uniform_(self.first.weight, -0.3, 0.3)

        def forward(self, x):
            angles = 3 * x @ self.frequencies
            return self.last(torch.sin(5 * self.first(torch.cat([angles.sin(), angles.cos()], -1))))

    def loss(model, x, wanted):
        x = x.clone().requires_grad_()
        return F.mse_loss(derivative(model(x), x), wanted)

    return training(job, Siren(), loss, pairs(2, 2))


@recipe("science", "a NeRF")
def nerf(job):
    """Rays, positional encoding, alpha compositing by a cumulative product."""
    model = nn.Sequential(nn.Linear(18, 16), nn.ReLU(), nn.Linear(16, 4))

    def loss(model, rays, wanted):
        start, way = rays.chunk(2, -1)
        depth = torch.linspace(0, 1, 5)
        points = start[:, None] + depth[:, None] * way[:, None]
        angles = torch.cat([points * f for f in (1.0, 2.0, 4.0)], -1)
        out = model(torch.cat([angles.sin(), angles.cos()], -1))
        alpha = 1 - torch.exp(-F.relu(out[..., 3]) * 0.2)
        clear = torch.cumprod(torch.cat([torch.ones_like(alpha[:, :1]), 1 - alpha + 1e-6], -1), -1)[:, :-1]
        return F.mse_loss(((alpha * clear)[..., None] * out[..., :3].sigmoid()).sum(1), wanted)

    return training(job, model, loss, pairs(6, 3))


@recipe("science", "low-rank and Tucker layers by einsum")
def tucker(job):
    """Products of three operands, with an ellipsis and repeated indices."""

    class Tucker(nn.Module):
        def __init__(self):
            super().__init__()
            self.core = nn.Parameter(torch.randn(2, 3, 2) / 2)
            self.a, self.b, self.c = (nn.Parameter(torch.randn(n, m) / 2) for n, m in ((4, 2), (4, 3), (5, 2)))

        def forward(self, x, y):
            weight = torch.einsum("pqr,ip,jq,or->ijo", self.core, self.a, self.b, self.c)
            return torch.einsum("...i,...j,ijo->...o", x, y, weight) + torch.einsum("iio->o", weight)

    return training(job, Tucker(), lambda m, x, y: m(x, y).square().mean(), pairs(4, 4))


def complex_network(job, make):
    """Complex weights, fitted to real numbers."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            double = torch.get_default_dtype() == torch.float64
            self.weight = nn.Parameter(torch.randn(3, 4, dtype=torch.complex128 if double else torch.complex64))
            self.bias = nn.Parameter(torch.randn(3))

        def forward(self, x):
            return (x.to(self.weight.dtype) @ self.weight.T).abs() + self.bias

    model = Model()
    optimizer = make(model.parameters())

    @job
    def train_step(x, y):
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return Training(model, optimizer, train_step, pairs(4, 3))


@recipe("science", "complex weights and AdamW")
def complex_adam(job):
    """AdamW with AMSGrad over complex parameters."""
    return complex_network(job, lambda parameters: torch.optim.AdamW(parameters, 0.01, amsgrad=True, eps=1e-5))


@recipe("science", "complex weights and Adagrad")
def complex_adagrad(job):
    """Adagrad over complex parameters."""
    return complex_network(job, lambda parameters: torch.optim.Adagrad(parameters, 0.05))


@recipe("science", "complex weights and Rprop")
def complex_rprop(job):
    """Rprop over complex parameters, whose step sizes are pairs."""
    return complex_network(job, lambda parameters: torch.optim.Rprop(parameters, 0.01))


@recipe("science", "least squares in a step")
def least_squares(job):
    """torch.linalg.lstsq with each of its drivers: solutions, residuals, ranks and singular values."""
    model = nn.Linear(4, 4)

    def loss(model, x, y):
        h = model(x)
        plain = torch.linalg.lstsq(h, y).solution
        by_qr = torch.linalg.lstsq(h, y, driver="gels")
        _, residuals, rank, values = torch.linalg.lstsq(h, y, driver="gelsd")
        weights = torch.linalg.lstsq(model.weight, y[0, :4]).solution
        return (
            plain.square().mean() + by_qr.residuals.mean() + (by_qr.solution * residuals[:, None]).mean()
            + (rank * values.sum(-1)).mean() + weights.tanh().sum()
        )  # fmt: skip

    g = torch.Generator().manual_seed(3)
    batches = [(torch.randn(8, 6, 4, generator=g), torch.randn(8, 6, 2, generator=g)) for _ in range(3)]
    return training(job, model, loss, batches, torch.optim.SGD(model.parameters(), 1e-3))


@recipe("science", "covariances")
def covariances(job):
    """torch.cov and corrcoef of a batch's features, as in VICReg and CORAL."""
    model = nn.Linear(5, 4)

    def loss(model, x, y):
        h = model(x)
        return (torch.cov(h.T) - torch.cov(y.T, correction=0)).square().sum() + torch.corrcoef(h.T).sum()

    return training(job, model, loss, pairs(5, 4))
