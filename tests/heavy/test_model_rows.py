"""That diffusers and transformers have what each row of the table of names says."""

from __future__ import annotations

import inspect

import diffusers
import pytest
import transformers

from aoquant.models import MODELS, ModelRow

ROWS = pytest.mark.parametrize("row", MODELS.values(), ids=lambda row: row.name)


@ROWS
def test_the_pipeline_of_a_row_takes_its_components_in_that_order(row: ModelRow) -> None:
    takes = inspect.signature(getattr(diffusers, row.pipeline).__init__).parameters
    assert [name for name in takes if name in row.components] == list(row.components)


@ROWS
def test_the_component_classes_of_a_row_are_models(row: ModelRow) -> None:
    for name, class_name in row.components.items():
        of_transformers = "encoder" in name
        kind = transformers.PreTrainedModel if of_transformers else diffusers.ModelMixin
        assert issubclass(getattr(transformers if of_transformers else diffusers, class_name), kind)


@ROWS
def test_the_component_classes_of_a_row_are_those_that_its_pipeline_asks_for(row: ModelRow) -> None:
    """Its constructor is annotated with the class or a base of it."""
    takes = inspect.signature(getattr(diffusers, row.pipeline).__init__).parameters
    for name, class_name in row.components.items():
        annotation = str(takes[name].annotation)
        offered = getattr(transformers if "encoder" in name else diffusers, class_name)
        bases = [base.__name__ for base in offered.__mro__]
        assert any(base in annotation for base in bases), f"{name}: {annotation}"
