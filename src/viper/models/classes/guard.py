"""Methods that answer for two classes only."""

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar, cast

from sklearn.utils.validation import check_is_fitted

Answer = TypeVar("Answer", bound=Callable[..., Any])


def for_two_classes(method: Answer) -> Answer:
    """Raise if the model has more than two classes, rather than answer wrongly."""

    @wraps(method)
    def answer(model: Any, *args: Any, **given: Any) -> Any:
        check_is_fitted(model, "posterior_")
        if model.multiclass_:
            raise ValueError(
                f"{method.__name__}() is for two classes; got a model of {len(model.classes_)}. Fit one class against "
                "the others, or two of the classes."
            )
        return method(model, *args, **given)

    return cast(Answer, answer)
