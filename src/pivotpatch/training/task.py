"""Tasks: model and loss as one module, so that the loop never learns the method."""

from copy import deepcopy
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from pivotpatch.accel.device import send_tensor
from pivotpatch.core.counterfactual import CounterfactualLogits
from pivotpatch.core.losses import AsymmetricLoss, BinaryCrossEntropyLoss, binary_divergence
from pivotpatch.core.patches import align_patches
from pivotpatch.data.augment import Augmentation
from pivotpatch.errors import InputError
from pivotpatch.models.classifier import (
    Classifier,
    Embeddings,
    MultiLabelClassifier,
    SharedClassifier,
)
from pivotpatch.models.open import open_model
from pivotpatch.models.patch_classifier import PatchClassifier
from pivotpatch.models.views import Views, make_views
from pivotpatch.peers.c_tran import CTranHead, draw_known
from pivotpatch.peers.cpsd import Teachers
from pivotpatch.peers.mcar import MCARClassifier
from pivotpatch.peers.rarl import SPREAD, RARLHead, find_reward
from pivotpatch.peers.splicemix import draw_cells, find_inconsistency, splice_images, split_cells, unite_targets
from pivotpatch.peers.svm import SquaredHingeLoss
from pivotpatch.training.config import LossSection, RunConfig

_TINY = 1e-12  # the least share of a patch that a logarithm is taken of


class Kept(NamedTuple):
    """What is left of views behind a frozen backbone."""

    embeddings: Embeddings  # of B images
    fold: Tensor  # (B,) that each is in
    ordinary: Embeddings | None = None  # of other images, which are in no fold
    absent: Tensor | None = None  # (L,) what all of these are taken to show: 0 for nothing, NaN where nobody knows


class Task(nn.Module):
    """A model and what it is trained for.

    Attributes:
        model: the model.
        folds: of a frozen model: heads that learn beside its own, each from the images of all folds but one.
        loss: of logits (B,L) against target (B,L), summed.
        parts: names of the K parts of the loss.
        ranking: the kind of logits that checkpoints are compared by.
    """

    parts: tuple[str, ...]
    ranking: ClassVar[str]

    def __init__(self, model: Classifier, loss: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.loss = loss
        self.folds = nn.ModuleList()

    @property
    def views_per_image(self) -> int:
        """How many views are drawn for each image: itself, its patches, and the larger image last."""
        model = self.model
        if not isinstance(model, PatchClassifier):
            return 1
        return 1 + (0 if model.regions else model.patching.count) + (model.closer_size is not None)

    @property
    def picture_size(self) -> int:
        """Rows and columns of the images that a loader is to give."""
        return self.model.picture_size

    def make_views(self, images: Tensor, *, augmentation: Augmentation | None = None, compiled: bool = False) -> Views:
        """The views of images (B,3,h,w) uint8 from the loader, on their device."""
        return make_views(self.model, images, augmentation=augmentation, compiled=compiled)

    def forward(self, seen: Views | Kept, target: Tensor) -> Tensor:
        """The K parts of the loss of a batch against its target (B,L), each summed over images and labels.

        Heads of folds learn from what a frozen backbone made of views before; their losses, and those of ordinary
        images, are told nobody.
        """
        if isinstance(seen, Views):
            return self.judge_views(seen, target)
        parts = self.judge(self.model, seen.embeddings, target)
        for number, heads in enumerate(self.folds):
            others = target.masked_fill((seen.fold == number)[:, None], torch.nan)
            cost = self.judge(heads, seen.embeddings, others)
            parts = parts + (cost - cost.detach())
        if seen.ordinary is not None:
            assert seen.absent is not None
            absent = seen.absent.expand(len(seen.ordinary.image), -1)
            costs = [self.judge(heads, seen.ordinary, absent).sum() for heads in (self.model, *self.folds)]
            cost = torch.stack(costs).sum()
            parts = parts + (cost - cost.detach()) / len(parts)
        return parts

    def judge_views(self, views: Views, target: Tensor) -> Tensor:
        """The K parts of the loss of a batch of views."""
        assert isinstance(self.model, SharedClassifier)
        return self.judge(self.model, self.model.embed_views(*views[:3]), target)

    def judge(self, model: Any, embeddings: Embeddings, target: Tensor) -> Tensor:
        """The K parts of the loss of what a model's heads make of embeddings."""
        raise NotImplementedError

    def freeze(self, *, folds: int) -> None:
        """Train the last steps alone, and those of so many folds beside them."""
        assert isinstance(self.model, SharedClassifier)
        self.model.requires_grad_(False)
        for last in (self.model.head.project, *map(self.model.get_submodule, self.model.projections)):
            last.requires_grad_(True)
        copies = (deepcopy(self.model, {id(self.model.backbone): None}) for _ in range(folds))
        self.folds.extend(copies)


class WholeImageTask(Task):
    """The baseline: loss(p, y)."""

    parts: tuple[str, ...] = ("image",)
    ranking = "image"

    def judge_views(self, views: Views, target: Tensor) -> Tensor:
        """Loss (1,) of the image logits."""
        return torch.stack([self.loss(self.model(views.image), target)])

    def judge(self, model: Any, embeddings: Embeddings, target: Tensor) -> Tensor:
        """Loss (1,) of the image logits."""
        return torch.stack([self.loss(model.project_embeddings(embeddings), target)])


class SpliceTask(WholeImageTask):
    """SpliceMix: loss(p, y) of images and of grids of them, and with `consistent` of cells against whole images."""

    model: MultiLabelClassifier
    parts: tuple[str, ...] = ("image", "spliced")

    def __init__(self, model: MultiLabelClassifier, loss: nn.Module, *, share: float, consistent: bool) -> None:
        super().__init__(model, loss)
        self.share, self.consistent = share, consistent
        self.parts = (*self.parts, "consistency") if consistent else self.parts

    def make_views(self, images: Tensor, *, augmentation: Augmentation | None = None, compiled: bool = False) -> Views:
        """The images (B,3,h,w) uint8 of the loader as the model sees them, and grids of these."""
        views = super().make_views(images, augmentation=augmentation, compiled=compiled)
        cells = send_tensor(draw_cells(len(images), share=self.share), images.device)
        return views._replace(spliced=splice_images(views.image, cells), cells=cells)

    def judge_views(self, views: Views, target: Tensor) -> Tensor:
        """Losses (2,) of images and of grids; (3,) with the inconsistency of their cells."""
        assert views.spliced is not None
        assert views.cells is not None
        features = self.model.backbone(torch.cat([views.image, views.spliced]))
        whole, grids = features.split([views.image.shape[0], views.spliced.shape[0]])
        logits = self.model.head(whole)
        costs = [self.loss(logits, target), self.loss(self.model.head(grids), unite_targets(target, views.cells))]
        if self.consistent:
            cells = [self.model.head(cell) for cell in split_cells(grids, *views.cells.shape[1:])]
            shown = views.cells.where(find_taught(target)[views.cells], -1)
            costs.append(find_inconsistency(torch.stack(cells, dim=1), logits, shown))
        return torch.stack(costs)


class StudentTask(WholeImageTask):
    """CPSD's student: the loss of labels, and what its logits differ from those of teachers."""

    model: MultiLabelClassifier
    parts: tuple[str, ...] = ("image", "teachers")

    def __init__(self, model: MultiLabelClassifier, loss: nn.Module, *, teachers: Teachers, share: float) -> None:
        super().__init__(model, loss)
        self.teachers, self.share = teachers, share  # not modules of the task: nobody trains or saves them

    def judge_views(self, views: Views, target: Tensor) -> Tensor:
        """Losses (2,) of both."""
        logits = self.model(views.image)
        difference = (self.teachers.find_difference(views.image, logits) * find_taught(target)).sum()
        return torch.stack([(1 - self.share) * self.loss(logits, target), self.share * difference])


class CropTask(WholeImageTask):
    """MCAR's training: the loss of the whole image and that of the largest logits of its crops."""

    model: MCARClassifier
    parts: tuple[str, ...] = ("image", "crop")

    def judge_views(self, views: Views, target: Tensor) -> Tensor:
        """Losses (2,) of both."""
        return torch.stack([self.loss(logits, target) for logits in self.model.forward_both(views.image)])


class RevealingTask(WholeImageTask):
    """C-Tran's training: some labels are revealed to the model, and the loss is that of the others."""

    def judge_views(self, views: Views, target: Tensor) -> Tensor:
        """Loss (1,) of the image logits of labels that were not revealed."""
        head: Any = self.model.head
        known = draw_known(target)
        logits = head.project(head.embed(self.model.backbone(views.image), known))  # type: ignore[operator]
        return torch.stack([self.loss(logits, target.masked_fill(known.isfinite(), torch.nan))])


class RewardedTask(WholeImageTask):
    """RARL's training: the loss, and how likely the drawn places were, times what they were worth above the mean."""

    parts: tuple[str, ...] = ("image", "reward")

    def judge_views(self, views: Views, target: Tensor) -> Tensor:
        """Losses (2,) of both."""
        head: Any = self.model.head
        embedding, likelihood = head.walk(self.model.backbone(views.image), spread=SPREAD)  # type: ignore[operator]
        logits = head.project(embedding)
        reward, taught = find_reward(logits.detach(), target), find_taught(target)
        usual = (reward * taught).sum() / taught.sum().clamp(min=1)
        return torch.stack([self.loss(logits, target), -((reward - usual) * taught * likelihood).sum()])


class PatchTask(Task):
    """PAT-T, equation 5: loss(p, y) + loss(q, y), unweighted, with no loss on the sum.

    A model that takes closer looks is trained for them too, by the same two losses of the larger image.
    """

    model: PatchClassifier
    parts: tuple[str, ...] = ("image", "patch")
    ranking = "tde"

    def __init__(self, model: PatchClassifier, loss: nn.Module) -> None:
        super().__init__(model, loss)
        if model.closer_size is not None:
            self.parts = (*self.parts, "closer")

    def make_views(self, images: Tensor, *, augmentation: Augmentation | None = None, compiled: bool = False) -> Views:
        """The views of images (B,3,h,w) uint8 from the loader, on their device."""
        size, count = self.model.closer_size, len(images)
        if size is None:
            return super().make_views(images, augmentation=augmentation, compiled=compiled)
        usual = last = None
        if augmentation is not None:
            others = torch.arange(count, count * self.views_per_image).reshape(count, -1)
            usual = augmentation.select(torch.cat([torch.arange(count), others[:, :-1].flatten()]))
            last = augmentation.select(others[:, -1])
        views = super().make_views(images, augmentation=usual, compiled=compiled)
        closer = make_views(self.model, images, augmentation=last, patches=False, size=size, compiled=compiled)
        return views._replace(closer=closer.image)

    def judge(self, model: Any, embeddings: Embeddings, target: Tensor) -> Tensor:
        """Losses (2,) of image and pooled patch logits; (3,) with that of a closer look."""
        out = model.project_embeddings(embeddings)
        costs = [self.loss(out.image_logits, target), self.loss(out.pooled_logits, target)]
        if embeddings.closer is not None:
            again = model.project_embeddings(Embeddings(embeddings.closer, embeddings.closer_patches))
            costs.append(self.loss(again.image_logits, target) + self.loss(again.pooled_logits, target))
        return torch.stack(costs)


class TaughtTask(PatchTask):
    """PAT-T of regions that is drawn to a trained PAT-T, which sees the same augmented image and patches cut from it.

    The divergence of the image logits, that of each patch's logits, and that of the patch weights where the teacher
    sees the label. Regions that are cut in another way than the teacher's patches are first pooled to these.
    """

    def __init__(self, model: PatchClassifier, loss: nn.Module, *, teacher: PatchClassifier, share: float) -> None:
        super().__init__(model, loss)
        self.parts, self.share = (*self.parts, "teacher"), share
        self._teacher = (teacher.requires_grad_(False).eval(),)  # no part of what is trained, saved or averaged
        shares = align_patches(teacher.patching, model.patching)
        self.register_buffer("shares", shares.to(next(model.parameters()).device), persistent=False)
        self.shares: Tensor

    @property
    def picture_size(self) -> int:
        """Rows and columns of the images that a loader is to give: enough for the teacher's patches."""
        return max(self.model.picture_size, self._teacher[0].picture_size)

    def make_views(self, images: Tensor, *, augmentation: Augmentation | None = None, compiled: bool = False) -> Views:
        """The views of images (B,3,h,w) uint8: each is augmented once, for both models."""
        drawn = images if augmentation is None else augmentation.apply(images, compiled=compiled)
        shown = make_views(self._teacher[0], drawn, compiled=compiled)
        return super().make_views(drawn, compiled=compiled)._replace(shown=(shown.image, shown.patches))

    def judge_views(self, views: Views, target: Tensor) -> Tensor:
        """Losses (3,): of image and pooled logits, and what the teacher says otherwise."""
        assert views.shown is not None
        embeddings = self.model.embed_views(*views[:2])
        with torch.no_grad():
            wanted = self._teacher[0].forward_views(*views.shown)
        costs = self.compare(self.model.project_embeddings(embeddings), wanted)
        own = self.judge(self.model, embeddings, target)
        return torch.cat([(1 - self.share) * own, self.share * (costs * find_taught(target)).sum()[None]])

    def compare(self, out: CounterfactualLogits, wanted: CounterfactualLogits) -> Tensor:
        """How far (B,) logits and weights are from those of the teacher, summed over labels, patches on average."""
        parts = self.shares[..., None] * out.weights[:, None]  # (B,P,Q,L); no product of matrices, which would round
        mass = parts.sum(dim=2)
        logits = (parts * out.patch_logits[:, None]).sum(dim=2) / mass.clamp(min=_TINY)
        weights = (mass / mass.sum(dim=1, keepdim=True)).clamp(min=_TINY)
        apart = (wanted.weights * (wanted.weights.clamp(min=_TINY) / weights).log()).sum(dim=1)
        costs = (
            binary_divergence(out.image_logits, wanted.image_logits),
            binary_divergence(logits, wanted.patch_logits).mean(dim=1),
            wanted.pooled_logits.sigmoid() * apart,
        )
        return torch.stack(costs).sum(dim=(0, 2))


class PatchOnlyTask(Task):
    """The paper's study of image scale: loss(q, y); no whole image passes the model."""

    model: PatchClassifier
    parts = ("patch",)
    ranking = "patch"

    def __init__(self, model: PatchClassifier, loss: nn.Module) -> None:
        super().__init__(model, loss)
        model.head.project.requires_grad_(False)  # it gets no gradient, which several processes would wait for

    def judge_views(self, views: Views, target: Tensor) -> Tensor:
        """Loss (1,) of the pooled patch logits."""
        return torch.stack([self.loss(self.model.forward_patches(views.patches), target)])


def find_taught(target: Tensor) -> Tensor:
    """Which images (B,) there is anything to learn of: not of one that only fills a batch, whose target is unknown."""
    return ~target.isnan().all(dim=1)


def make_task(model: Classifier, config: RunConfig) -> Task:
    """The task that a configuration names, around a model."""
    loss, mix, distil = make_loss(config.loss), config.mix, config.distil
    if distil.teachers and isinstance(model, PatchClassifier):
        return _make_taught(model, loss, config)
    check_extras(config, head=model.architecture.head)
    if distil.teachers:
        assert isinstance(model, MultiLabelClassifier)
        teachers = Teachers([_open_teacher(name) for name in distil.teachers], model)
        return StudentTask(model, loss, teachers=teachers, share=distil.share)
    if mix.share:
        assert isinstance(model, MultiLabelClassifier)
        return SpliceTask(model, loss, share=mix.share, consistent=mix.consistent)
    if isinstance(model, MCARClassifier):
        return CropTask(model, loss)
    if not isinstance(model, PatchClassifier):
        kinds: dict[type, type[WholeImageTask]] = {CTranHead: RevealingTask, RARLHead: RewardedTask}
        return kinds.get(type(getattr(model, "head", None)), WholeImageTask)(model, loss)
    return PatchOnlyTask(model, loss) if config.task.kind == "patch_only" else PatchTask(model, loss)


def check_extras(config: RunConfig, *, head: str) -> None:
    """Refuse grids and teachers where no plain model is trained, or where one would hide the other.

    The `head` is that of the model, which a checkpoint may have brought.
    """
    mix, distil = config.mix, config.distil
    asked = {"mix.share": mix.share, "distil.teachers": distil.teachers, "distil.groups": distil.groups}
    for name in (name for name, value in asked.items() if value and config.task.kind != "image"):
        raise InputError(name, f"task.kind is {config.task.kind}", "leave it out, or train task.kind=image")
    if mix.share and (distil.teachers or distil.groups):
        raise InputError("mix.share", f"is {mix.share}, and teachers see no grids", "leave it out, or distil")
    others = [name for name, value in asked.items() if value]
    others += [f"task.kind={kind}" for kind in ("windows", "independent") if kind == config.task.kind]
    if others and head in ("c_tran", "rarl"):
        wrong = f"{head} is trained in a way of its own, which {' and '.join(others)} would replace"
        raise InputError("model.head", wrong, f"take another head, or leave out {' and '.join(others)}")
    if mix.share and config.train.accumulate > 1:
        wrong = f"is {config.train.accumulate}, and grids would be made of the images of a part of a batch"
        raise InputError("train.accumulate", wrong, "leave it out, or leave out mix.share")
    if mix.consistent and not mix.share:
        raise InputError("mix.consistent", "there are no grids, mix.share is 0", "leave it out, or set mix.share=0.25")


def _open_teacher(name: str) -> Classifier:
    """A teacher by its name; whoever took a recipe may not know that it needs one."""
    try:
        return open_model(name)
    except InputError as error:
        where, wrong, todo = error.parts
        raise InputError(f"distil.teachers: {where}", wrong, f"{todo}; train the teacher first") from None


def _make_taught(model: PatchClassifier, loss: nn.Module, config: RunConfig) -> TaughtTask:
    """The task of a model of regions and its teacher, which is opened here."""
    where, (name, *more) = "distil.teachers", config.distil.teachers
    extras = config.mix.share or config.mix.consistent or config.distil.groups
    if not model.regions or model.closer_size is not None or more or extras:
        wrong = "with patches one teaches a model of regions of the feature map, without a closer look, mix and groups"
        raise InputError(where, wrong, "give task.regions=true and one teacher, or leave it out")
    teacher = _open_teacher(name)
    if not isinstance(teacher, PatchClassifier) or teacher.patch_only or teacher.regions:
        raise InputError(where, f"{name} is no PAT-T with patches of its own", "train one by task.kind=patch")
    if teacher.labels != model.labels:
        raise InputError(where, f"{name} has other labels, or in another order", "train it on the same data")
    device = next(model.parameters()).device
    if config.precision.channels_last:
        teacher = teacher.to(memory_format=torch.channels_last)
    return TaughtTask(model, loss, teacher=teacher.to(device), share=config.distil.share)


def make_loss(section: LossSection) -> nn.Module:
    """The loss that a configuration names, summed: the loop divides where a mean is wanted."""
    if section.name == "binary_cross_entropy":
        return BinaryCrossEntropyLoss()
    if section.name == "squared_hinge":
        return SquaredHingeLoss()
    assert section.name == "asymmetric"
    return AsymmetricLoss(**section.model_dump(exclude={"name", "reduction"}))
