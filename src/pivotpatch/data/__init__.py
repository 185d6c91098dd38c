"""From disk to tensors; knows no model."""

from typing import TYPE_CHECKING

from pivotpatch.faces import make_face

if TYPE_CHECKING:
    from pivotpatch.data.address import open_records as open_records
    from pivotpatch.data.address import read_address as read_address
    from pivotpatch.data.augment import AugmentPolicy as AugmentPolicy
    from pivotpatch.data.augment import draw_augmentation as draw_augmentation
    from pivotpatch.data.check import check_data as check_data
    from pivotpatch.data.loading import Batch as Batch
    from pivotpatch.data.loading import hold_images as hold_images
    from pivotpatch.data.loading import make_loader as make_loader
    from pivotpatch.data.records import FileStore as FileStore
    from pivotpatch.data.records import ImageStore as ImageStore
    from pivotpatch.data.records import LabelSpace as LabelSpace
    from pivotpatch.data.records import Record as Record
    from pivotpatch.data.records import RecordSet as RecordSet
    from pivotpatch.data.scenes import read_scenes as read_scenes
    from pivotpatch.data.split import split_records as split_records
    from pivotpatch.data.split import write_split as write_split

__getattr__ = make_face(
    __name__,
    {
        "address": "open_records read_address",
        "augment": "AugmentPolicy draw_augmentation",
        "check": "check_data",
        "loading": "Batch hold_images make_loader",
        "records": "FileStore ImageStore LabelSpace Record RecordSet",
        "scenes": "read_scenes",
        "split": "split_records write_split",
    },
)
