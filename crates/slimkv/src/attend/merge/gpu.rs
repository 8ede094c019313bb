use crate::attend::Attended;
use crate::{Result, Tensor};
pub(crate) fn merge(_op: &'static str, _a: &Tensor, _la: &Tensor, _b: &Tensor, _lb: &Tensor) -> Result<Attended> {
    todo!()
}
