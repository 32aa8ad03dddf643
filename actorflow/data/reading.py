"""Read rows of a dataset: fetch their samples, with random numbers by element, and collate them.

Workers run this, and a rank without workers does it itself.
"""

from __future__ import annotations

import copy
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import default_collate

from actorflow.data.batch_slots import Room
from actorflow.data.element_random import ElementRandom
from actorflow.data.order import Picked
from actorflow.data.padding import PaddedPart, SamplePadder, row_sizes
from actorflow.data.structure import Structure, as_tensor, take_apart
from actorflow_compiler.core.errors import ActorflowError, DataError
from actorflow_compiler.core.runs import Runs
from actorflow_compiler.core.torch_internals import collate_into
from actorflow_compiler.core.user_code import is_users, with_code

__all__ = [
    "BatchTemplate", "Doing", "LeafSpec", "ReadFailure", "ReadRequest", "SampleReader", "dtype_text", "raised",
    "said_of",
]  # fmt: skip

Collate = Callable[[list[Any]], Any]
Doing = np.ndarray[Any, Any]
"""int64[3], which others see: epoch, the place in it of the row that is being read, and process."""


@dataclass(frozen=True, slots=True)
class LeafSpec:
    """One tensor of a batch."""

    path: str  # in the batch: "labels", "0"
    shape: tuple[int, ...]  # of one row
    dtype: torch.dtype

    @property
    def text(self) -> str:
        """``labels: int64[rows,8]``."""
        return f"{self.path or 'the batch'}: {dtype_text(self.dtype)}[{','.join(('rows', *map(str, self.shape)))}]"


@dataclass(frozen=True, slots=True)
class BatchTemplate:
    """What all batches of a source look like."""

    structure: Structure
    leaves: tuple[LeafSpec, ...]
    why_whole: str = ""  # why its batches have to be read whole on every rank; empty: they are read by rows
    padded: tuple[PaddedPart, ...] = ()  # what of a sample is padded to the size of a bucket
    buckets: tuple[tuple[int, tuple[LeafSpec, ...]], ...] = ()  # size of a bucket → the leaves of its batches

    def of(self, bucket: int) -> tuple[LeafSpec, ...]:
        """The leaves of a batch of this bucket (0: of a source without)."""
        return dict(self.buckets).get(bucket, self.leaves)

    @property
    def text(self) -> str:
        """The tensors of a batch, for messages."""
        return "; ".join(spec.text for spec in self.leaves)

    def to_json(self) -> Any:
        """As JSON, from which ``from_json`` makes an equal one."""
        padded = [[part.path, dtype_text(part.dtype)] for part in self.padded]
        buckets = [[size, _specs_to_json(leaves)] for size, leaves in self.buckets]
        return [self.structure.to_json(), _specs_to_json(self.leaves), self.why_whole, padded, buckets]

    @staticmethod
    def from_json(said: Any) -> BatchTemplate:
        """The inverse of ``to_json``."""
        structure, leaves, why, padded, buckets = said
        return BatchTemplate(
            Structure.from_json(structure),
            _specs_from_json(leaves),
            why,
            tuple(PaddedPart(path, getattr(torch, dtype)) for path, dtype in padded),
            tuple((size, _specs_from_json(specs)) for size, specs in buckets),
        )


def _specs_to_json(leaves: Sequence[LeafSpec]) -> Any:
    return [[spec.path, list(spec.shape), dtype_text(spec.dtype)] for spec in leaves]


def _specs_from_json(said: Any) -> tuple[LeafSpec, ...]:
    return tuple(LeafSpec(path, tuple(shape), getattr(torch, dtype)) for path, shape, dtype in said)


@dataclass(frozen=True, slots=True)
class ReadRequest:
    """Some rows of one batch, to be read."""

    epoch: int
    number: int  # of the batch in its epoch
    places: tuple[int, ...]  # of the rows in the epoch
    indices: tuple[Any, ...]  # of the rows in the dataset
    given: Mapping[int, Any] = field(default_factory=dict)  # samples that were read before, by place
    leaves: bool = True  # the tensors of a batch that has the template; else what collate returns, as it is
    seed: int = 0  # of the random numbers of elements
    bucket: int = 0  # the size to which samples are padded; 0: they are not

    @staticmethod
    def of(epoch: int, number: int, picked: Picked, rows: Runs, seed: int, leaves: bool = True) -> ReadRequest:
        """These rows of a batch, counted from its first."""
        at = [row for lo, hi in rows for row in range(lo, hi)]
        places, indices = tuple(picked.row + row for row in at), tuple(picked.indices[row] for row in at)
        return ReadRequest(epoch, number, places, indices, {}, leaves, seed, picked.bucket)


@dataclass(frozen=True, slots=True)
class ReadFailure:
    """Rows that could not be read."""

    text: str  # what failed, for people, without the name of the source

    def error(self, source: str) -> DataError:
        """The error to raise, which names the source."""
        return DataError(f"{source}: {self.text}")


class SampleReader:
    """Reads rows of a map-style dataset.

    ``collate`` makes a batch of a list of samples (None: torch's ``default_collate``), which ``padder`` has made as
    long as their bucket before.  ``template``, which ``try_probe`` finds, must be set before ``read``.
    """

    def __init__(self, dataset: Any, collate: Collate | None, padder: SamplePadder | None = None) -> None:
        self.dataset, self.padder = dataset, padder
        self.collate: Collate = default_collate if collate is None else collate
        self.template: BatchTemplate | None = None
        self._random: ElementRandom | None = None  # found when first needed: in a worker, the worker's
        self._draws = False  # fetching many samples at once draws random numbers: fetch them one by one

    @property
    def random(self) -> ElementRandom:
        """The generators that samples draw from."""
        if self._random is None:
            self._random = ElementRandom(self.dataset, self.collate)
        return self._random

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_random": None}

    def read(
        self, request: ReadRequest, doing: Doing | None = None, room: Room | None = None
    ) -> list[Tensor] | Any | ReadFailure:
        """The rows of each tensor of the batch, or what collate returns; a failure is returned, not raised.

        ``doing[1]`` is set to the place in the epoch of the row that is being read; torch's ``default_collate`` puts
        tensors in ``room``.
        """
        try:
            template = self.template
            samples = self._padded(request, self.samples(request, doing), template.padded if template else ())
            if not request.leaves:
                return self._collated(request, samples)
            return self._leaves(request, samples, room)
        except _Failed as failed:
            return ReadFailure(str(failed))

    def samples(self, request: ReadRequest, doing: Doing | None = None) -> list[Any]:
        """The samples of the rows of a request, in order."""
        missing = [
            (place, index)
            for place, index in zip(request.places, request.indices, strict=True)
            if place not in request.given
        ]
        found = {**request.given}
        if missing and callable(many := getattr(self.dataset, "__getitems__", None)) and not self._draws:
            self.random.seed(request.seed, request.epoch, missing[0][0])
            before = self.random.state()
            indices = [index for _, index in missing]
            try:
                fetched = list(many(indices))
            except Exception as error:
                raise _Failed(f"reading samples {_some(indices)} raised {raised(error)}") from error
            if len(fetched) != len(indices):
                raise _Failed(
                    f"__getitems__ of {type(self.dataset).__name__} returned {len(fetched)} samples for "
                    f"{len(indices)} indices ({_some(indices)}); one for each was expected"
                )
            self._draws = self.random.state() != before or self.random.found_more()
            if not self._draws:
                found |= {place: sample for (place, _), sample in zip(missing, fetched, strict=True)}
                missing = []
        for place, index in missing:
            if doing is not None:
                doing[1] = place
            found[place] = self._sample(request, place, index)
        return [found[place] for place in request.places]

    def try_probe(self, request: ReadRequest) -> tuple[BatchTemplate | ReadFailure, dict[int, Any]]:
        """What batches look like, from the first rows of one; with the samples of these, by place.

        A failure is returned, not raised.
        """
        try:
            template, read = self._probe(request)
        except _Failed as failed:
            return ReadFailure(str(failed)), {}
        except Exception as error:  # other ranks wait to be told what batches look like
            return ReadFailure(f"looking at samples {_some(request.indices)} raised {raised(error)}"), {}
        return template, read

    @property
    def probed(self) -> int:
        """How many rows ``try_probe`` needs: of torch's collate it is known that it joins samples and does no more."""
        return 1 if self.collate is default_collate else 2

    def sizes(self, index: int) -> dict[str, int]:
        """The sizes of dim 0 of the tensors of a sample, by path; what the dataset raises, it raises as DataError."""
        request = ReadRequest(0, 0, (index,), (index,))
        try:
            return row_sizes(index, self._sample(request, index, index))
        except _Failed as failed:
            raise DataError(str(failed)) from failed

    # -- one sample, and many --------------------------------------------------------------------------

    def _sample(self, request: ReadRequest, place: int, index: Any) -> Any:
        self.random.seed(request.seed, request.epoch, place)
        sample = self._fetched(request, place, index)
        if self.random.found_more():
            self.random.seed(request.seed, request.epoch, place)
            sample = self._fetched(request, place, index)
        return sample

    def _fetched(self, request: ReadRequest, place: int, index: Any) -> Any:
        try:
            if callable(getattr(self.dataset, "__getitems__", None)):
                return next(iter(self.dataset.__getitems__([index])))
            return self.dataset[index]
        except Exception as error:
            raise _Failed(
                f"reading sample {index!r} (row {place} of epoch {request.epoch}) raised {raised(error)}"
            ) from error

    def _padded(self, request: ReadRequest, samples: list[Any], parts: Sequence[PaddedPart]) -> list[Any]:
        """The samples, as long as their bucket."""
        if self.padder is None or not request.bucket:
            return samples
        tensors = self.collate is default_collate
        try:
            return [
                self.padder.padded(index, sample, request.bucket, parts, tensors)
                for index, sample in zip(request.indices, samples, strict=True)
            ]
        except DataError as error:
            raise _Failed(str(error)) from error

    def _collated(
        self,
        request: ReadRequest,
        samples: list[Any],
        indices: Sequence[Any] | None = None,
        room: Room | None = None,
    ) -> Any:
        """The batch of some samples: those of a request, or those of these indices."""
        indices = request.indices if indices is None else indices
        self.random.seed(request.seed, request.epoch, -1 - request.number)
        try:
            if room is not None and self.collate is default_collate:
                return collate_into(samples, room.empty)
            return self.collate(samples)
        except Exception as error:
            if odd := self._odd(indices, samples, error, request.bucket):
                raise _Failed(odd) from error
            raise _Failed(
                f"collating samples {_some(indices)} of batch {request.number} raised {raised(error)}"
            ) from error

    def _leaves(self, request: ReadRequest, samples: list[Any], room: Room | None) -> list[Tensor]:
        template = self.template
        assert template is not None
        draws = self.collate is not default_collate
        if draws:
            self.random.seed(request.seed, request.epoch, -1 - request.number)
            before = self.random.state()
        elif not _alike(samples) and (odd := self._odd(request.indices, samples, bucket=request.bucket)):
            raise _Failed(odd)  # in a worker, default_collate converts to the first one's dtype
        batch = self._collated(request, samples, room=room)
        if draws and self.random.state() != before:
            raise _Failed(
                f"{_name(self.collate)} draws random numbers, which would be others on other numbers of ranks: draw "
                f"them in the dataset's __getitem__, where they are by sample, or pass whole=True: each rank reads "
                f"whole batches"
            )
        structure, leaves = take_apart(batch)
        rows = len(samples)
        tensors = [as_tensor(leaf) for _, leaf in leaves]
        fits = structure == template.structure and all(
            isinstance(tensor, Tensor) and (tuple(tensor.shape), tensor.dtype) == ((rows, *spec.shape), spec.dtype)
            for tensor, spec in zip(tensors, template.of(request.bucket), strict=True)
        )
        if not fits:
            odd = self._odd(request.indices, samples, bucket=request.bucket)
            raise _Failed(odd or self._mismatch(request, structure, leaves, rows))
        return [tensor for tensor in tensors if isinstance(tensor, Tensor)]

    def _mismatch(self, request: ReadRequest, structure: Structure, leaves: list[tuple[str, Any]], rows: int) -> str:
        template = self.template
        assert template is not None
        found = "; ".join(f"{path or 'the batch'}: {said_of(leaf)}" for path, leaf in leaves)
        expected = "; ".join(spec.text for spec in template.of(request.bucket))
        return (
            f"{_name(self.collate)} of {rows} samples gave {found}; {expected} was expected, as the "
            f"first samples of the source have it: where collate looks at all samples of a batch (it pads to the "
            f"longest, say), pass buckets=, or whole=True: each rank reads whole batches"
        )

    def _odd(self, indices: Sequence[Any], samples: list[Any], error: Exception | None = None, bucket: int = 0) -> str:
        """A sentence about the first sample that has another form than the source's first; empty if none has.

        Or about one of which collate alone raises what it has raised for all (``error``).
        """
        known = self.template
        template = None if known is None or known.why_whole else BatchTemplate(known.structure, known.of(bucket))
        for index, sample in zip(indices, samples, strict=True):
            try:
                one = copy.deepcopy(sample)
            except Exception:  # what holds an open file, say
                continue
            try:
                structure, leaves = take_apart(self.collate([one]))
            except Exception as alone:
                if type(alone) is not type(error):
                    continue  # a collate that needs several samples
                ours = self.collate is default_collate
                said = f"{type(alone).__name__}: {alone}" if ours else raised(alone)
                return f"{_name(self.collate)} of sample {index!r} alone raised {said}"
            specs = _specs(leaves)
            if template is None:
                template = BatchTemplate(structure, specs or ())
            elif structure != template.structure or specs != template.leaves:
                found = "; ".join(f"{path or 'it'}: {said_of(leaf)}" for path, leaf in leaves)
                return (
                    f"sample {index!r} has another form than the first of the source: a batch of it alone has {found}; "
                    f"{template.text} was expected (pad or crop in the dataset, or pass buckets=)"
                )
        return ""

    def _probe(self, request: ReadRequest) -> tuple[BatchTemplate, dict[int, Any]]:
        samples = self.samples(request)
        read = dict(zip(request.places, samples, strict=True))
        if self.padder is None or not request.bucket:
            return self._template(request, samples), read
        return self._bucket_template(self.padder, request, samples), read

    def _bucket_template(self, padder: SamplePadder, request: ReadRequest, samples: list[Any]) -> BatchTemplate:
        """What batches of each bucket look like: the shortest sample, which fits all, tells it.

        Beside it the longest one tells which tensors are as long as a sample, and not by chance of this size.
        """
        have = dict(zip(request.indices, samples, strict=True))
        ends = [
            (index, have[index] if index in have else self._sample(request, request.places[0], index))
            for index in padder.extremes()
        ]
        try:
            parts = padder.parts(ends)
        except DataError as error:
            raise _Failed(str(error)) from error
        template = self._template(request, self._padded(request, samples, parts), parts)
        buckets: list[tuple[int, tuple[LeafSpec, ...]]] = []
        for bucket in () if template.why_whole else padder.used:
            index, sample = ends[0]
            one = replace(request, places=request.places[:1], indices=(index,), bucket=bucket)
            padded = self._padded(one, [self._another(one, 0, sample)], parts)
            structure, leaves = take_apart(self._collated(one, padded))
            specs = _specs(leaves)
            if specs is None or structure != template.structure:
                found = "; ".join(f"{path or 'the batch'}: {said_of(leaf)}" for path, leaf in leaves)
                why = f"{_name(self.collate)} makes {found} of sample {index} in bucket {bucket}"
                return BatchTemplate(template.structure, (), why, parts)
            buckets.append((bucket, specs))
        return replace(template, padded=parts, buckets=tuple(buckets))

    def _another(self, request: ReadRequest, at: int, sample: Any, parts: Sequence[PaddedPart] = ()) -> Any:
        """A copy of a sample; where it holds what cannot be copied, as an open file, it is read once more."""
        try:
            return copy.deepcopy(sample)
        except Exception:
            one = replace(request, places=request.places[at : at + 1], indices=request.indices[at : at + 1])
            read = [self._sample(one, one.places[0], one.indices[0])]
            return self._padded(one, read, parts)[0] if parts else read[0]

    def _template(self, request: ReadRequest, samples: list[Any], parts: Sequence[PaddedPart] = ()) -> BatchTemplate:
        again = [self._another(request, at, sample, parts) for at, sample in enumerate(samples[:2])]
        self.random.seed(request.seed, request.epoch, -1 - request.number)
        before = self.random.state()
        where = _name(self.collate)
        try:
            alone = self._collated(request, [again[0]], request.indices[:1])
        except _Failed:
            if self.collate is default_collate:
                raise
            why = f"{where} fails for sample {request.indices[0]!r} alone"  # it may need several
            return BatchTemplate(Structure.leaf(), (), why)
        structure, leaves = take_apart(alone)
        drew = self.random.state() != before
        if not leaves:
            raise _Failed(f"{_name(self.collate)} gave a batch without tensors for sample {request.indices[0]!r}")
        specs = _specs(leaves)
        if specs is None:
            path, leaf = next((p, leaf) for p, leaf in leaves if not _is_row(leaf))
            at = f"{path!r} of the batch" if path else "the batch"
            why = f"{at} is {said_of(leaf)} for sample {request.indices[0]!r} ({where}), and no tensor of rows"
            return BatchTemplate(structure, (), why)
        template = BatchTemplate(structure, specs)
        if self.collate is default_collate:
            return template
        if drew:
            return BatchTemplate(structure, (), f"{where} draws random numbers")
        if len(samples) > 1 and not self._by_rows(request, samples[:2], again[1], parts, structure, leaves):
            some = " and ".join(repr(index) for index in request.indices[:2])
            why = f"{where} makes something else of samples {some} than of each alone"
            return BatchTemplate(structure, (), why)
        return template

    def _by_rows(
        self,
        request: ReadRequest,
        samples: list[Any],
        second: Any,
        parts: Sequence[PaddedPart],
        structure: Structure,
        first: Any,
    ) -> bool:
        """Whether collate makes the same of two samples as of each alone."""
        pair = [self._another(request, at, sample, parts) for at, sample in enumerate(samples)]
        both_structure, both = take_apart(self._collated(request, pair, request.indices[:2]))
        alone = self._collated(request, [second], request.indices[1:2])
        second_structure, second = take_apart(alone)
        if not structure == both_structure == second_structure or _specs(second) != _specs(first):
            return False
        for (_, a), (_, b), (_, ab) in zip(first, second, both, strict=True):
            x, y, xy = as_tensor(a), as_tensor(b), as_tensor(ab)
            if not isinstance(xy, Tensor) or tuple(xy.shape) != (2, *x.shape[1:]) or xy.dtype != x.dtype:
                return False
            if not torch.equal(_bits(xy), _bits(torch.cat([x, y]))):
                return False
        return True


class _Failed(Exception):
    """A failure to read, with the text for the user."""


def _is_row(leaf: Any) -> bool:
    """Whether a leaf of a batch of one sample is a dense tensor with one row."""
    tensor = as_tensor(leaf)
    plain = isinstance(tensor, Tensor) and tensor.layout == torch.strided and not tensor.is_quantized
    return plain and not tensor.is_nested and tensor.ndim > 0 and tensor.shape[0] == 1


def _specs(leaves: Sequence[tuple[str, Any]]) -> tuple[LeafSpec, ...] | None:
    """The tensors of a batch of one sample; None if not all leaves are tensors with one row."""
    if not all(_is_row(leaf) for _, leaf in leaves):
        return None
    tensors = [(path, as_tensor(leaf)) for path, leaf in leaves]
    return tuple(LeafSpec(path, tuple(tensor.shape[1:]), tensor.dtype) for path, tensor in tensors)


def _alike(samples: Sequence[Any]) -> bool:
    """Whether the tensors and arrays in all samples have the same dtypes and shapes."""
    return all(_same_form(samples[0], sample) for sample in samples[1:])


def _same_form(a: Any, b: Any) -> bool:
    """Whether ``_form`` of both is the same; for the usual types without making it."""
    kind = type(a)
    if kind is not type(b):
        return bool(_form(a) == _form(b))
    if kind is Tensor or kind is np.ndarray:
        return bool(a.dtype == b.dtype and a.shape == b.shape)
    if kind is tuple or kind is list:
        return len(a) == len(b) and all(map(_same_form, a, b))
    if kind is dict:
        return len(a) == len(b) and all(map(_same_form, a.values(), b.values()))
    return kind in _NUMBERS or bool(_form(a) == _form(b))


_NUMBERS = (int, float, str, bool)


def _form(sample: Any) -> Any:
    """Dtypes and shapes of the tensors and arrays in a sample."""
    if isinstance(sample, Tensor | np.ndarray):
        return sample.dtype, sample.shape
    if isinstance(sample, list | tuple):
        return [_form(part) for part in sample]
    if isinstance(sample, Mapping):
        return [_form(part) for part in sample.values()]
    return None


def _bits(tensor: Tensor) -> Tensor:
    """The tensor's bytes, so that NaN equals itself."""
    return tensor.contiguous().view(-1).view(torch.uint8) if tensor.numel() else tensor.new_empty(0, dtype=torch.uint8)


def said_of(leaf: Any) -> str:
    """A leaf of a batch for people: ``float32[4,3]``, or its type."""
    tensor = as_tensor(leaf)
    if isinstance(tensor, Tensor):
        return f"{dtype_text(tensor.dtype)}[{','.join(map(str, tensor.shape))}]"
    if isinstance(leaf, np.ndarray):
        return f"an array of {leaf.dtype}"
    return f"a {type(leaf).__name__} ({_short(leaf)})"


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


def _some(indices: Sequence[Any]) -> str:
    shown = ", ".join(map(repr, indices[:4]))
    return f"{shown}{f' and {len(indices) - 4} more' * (len(indices) > 4)}"


def dtype_text(dtype: torch.dtype) -> str:
    """``float32``."""
    return str(dtype).removeprefix("torch.")


def _name(function: Any) -> str:
    """A function for people, with the line where it begins."""
    if function is default_collate:
        return "torch's default_collate"
    code = getattr(getattr(function, "__func__", function), "__code__", None)
    name = getattr(function, "__qualname__", type(function).__qualname__)
    return f"collate {name}" + (f" ({code.co_filename}:{code.co_firstlineno})" if code is not None else "")


def raised(error: BaseException) -> str:
    """What a user's code raised, with its own lines of the traceback."""
    if isinstance(error, ActorflowError):
        return str(error)
    frames = traceback.extract_tb(error.__traceback__)
    first = next((i for i, frame in enumerate(frames) if is_users(frame.filename)), len(frames) - 1)
    lines = [
        f"  {with_code(f'{frame.filename}:{frame.lineno}')}  (in {frame.name})" for frame in frames[max(first, 0) :]
    ]
    return "\n".join([f"{type(error).__name__}: {error}", *lines])
