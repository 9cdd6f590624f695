"""What a partition looks like: measures, pictures, TensorBoard, and one page that holds it all."""

from ddm_lightning.prepare.report.grids import save_cluster_grid
from ddm_lightning.prepare.report.measures import Cost, KMeansSettings, ReportData
from ddm_lightning.prepare.report.write import PAGE, TENSORBOARD, write_report

__all__ = ["PAGE", "TENSORBOARD", "Cost", "KMeansSettings", "ReportData", "save_cluster_grid", "write_report"]
