"""Dense matrices to the nearest products of Kronecker-sparse factors."""

from flysurgery.projection.project import project as project
from flysurgery.projection.report import Projection as Projection
