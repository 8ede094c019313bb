//! The picture of an evaluation: what a method costs in bytes against what it costs in quality.

use std::path::Path;

use plotters::coord::Shift;
use plotters::prelude::*;
use plotters::style::{FontStyle, register_font};

use super::report::Record;
use crate::failure::{Failure, Outcome};
use crate::output;

const SIZE: (u32, u32) = (1080, 460);
const FONT: &str = "slimkv";
const INK: RGBColor = RGBColor(38, 43, 51);
const FAINT: RGBColor = RGBColor(226, 229, 233);
const PALETTE: [RGBColor; 7] = [
    RGBColor(31, 105, 193),
    RGBColor(213, 94, 0),
    RGBColor(0, 138, 96),
    RGBColor(170, 74, 148),
    RGBColor(196, 146, 0),
    RGBColor(70, 160, 210),
    RGBColor(110, 110, 110),
];

/// Draws to `path`; the ending, `.svg` or `.png`, decides the kind.
pub fn write(path: &Path, title: &str, records: &[Record]) -> Outcome {
    match extension(path)? {
        Kind::Svg => output::write(path, svg(title, records)?.as_bytes()),
        Kind::Png => output::write(path, &png(title, records)?),
    }
}

/// Checks the ending before long work starts.
pub fn check_path(path: &Path) -> Outcome {
    extension(path).map(drop)
}

enum Kind {
    Svg,
    Png,
}

fn extension(path: &Path) -> Outcome<Kind> {
    match path.extension().and_then(|e| e.to_str()).map(str::to_ascii_lowercase).as_deref() {
        Some("svg") => Ok(Kind::Svg),
        Some("png") => Ok(Kind::Png),
        _ => Err(Failure::argument("eval", "--plot", "a file that ends in .svg or .png", path.display())),
    }
}

fn svg(title: &str, records: &[Record]) -> Outcome<String> {
    let mut text = String::new();
    draw(SVGBackend::with_string(&mut text, SIZE).into_drawing_area(), title, records)?;
    // A reader's machine has no font of our name; say which family the metrics come from.
    Ok(text.replace(&format!("font-family=\"{FONT}\""), "font-family=\"Ubuntu, Helvetica, Arial, sans-serif\""))
}

fn png(title: &str, records: &[Record]) -> Outcome<Vec<u8>> {
    let mut pixels = vec![0; (SIZE.0 * SIZE.1 * 3) as usize];
    draw(BitMapBackend::with_buffer(&mut pixels, SIZE).into_drawing_area(), title, records)?;
    let mut file = Vec::new();
    let mut encoder = png::Encoder::new(&mut file, SIZE.0, SIZE.1);
    encoder.set_color(png::ColorType::Rgb);
    encoder.set_depth(png::BitDepth::Eight);
    let mut writer = encoder.write_header().map_err(failed)?;
    writer.write_image_data(&pixels).and_then(|()| writer.finish()).map_err(failed)?;
    Ok(file)
}

fn failed(why: impl std::fmt::Display) -> Failure {
    Failure::Failed(format!("cannot draw the plot: {why}"))
}

fn draw<B: DrawingBackend>(root: DrawingArea<B, Shift>, title: &str, records: &[Record]) -> Outcome {
    register_font(FONT, FontStyle::Normal, epaint_default_fonts::UBUNTU_LIGHT)
        .map_err(|_| failed("the built-in font cannot be read"))?;
    root.fill(&WHITE).map_err(failed)?;
    let root = root.margin(8, 0, 0, 0).titled(title, (FONT, 22).into_font().color(&INK)).map_err(failed)?;
    let panels = root.split_evenly((1, 2));
    panel(&panels[0], "perplexity", records, false, |r| Some(r.perplexity))?;
    panel(&panels[1], "mean KL divergence from fp16 (log scale)", records, true, |r| {
        Some(r.kl_mean).filter(|kl| *kl > 0.0)
    })?;
    root.present().map_err(failed)
}

/// One scatter plot over bytes a token. A logarithmic axis is drawn as the exponent, so that both kinds share code.
fn panel<B: DrawingBackend>(
    area: &DrawingArea<B, Shift>,
    title: &str,
    records: &[Record],
    log: bool,
    quality: impl Fn(&Record) -> Option<f64>,
) -> Outcome {
    let height = |value: f64| if log { value.log10() } else { value };
    let points: Vec<(f64, f64, &str, RGBColor)> = records
        .iter()
        .enumerate()
        .filter_map(|(i, r)| {
            let y = height(quality(r)?);
            y.is_finite().then_some((r.bytes_per_token, y, r.method.as_str(), PALETTE[i % PALETTE.len()]))
        })
        .collect();
    let right = records.iter().map(|r| r.bytes_per_token).fold(0.0, f64::max) * 1.22;
    let (low, high) =
        points.iter().fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), p| (low.min(p.1), high.max(p.1)));
    let (low, high) = if points.is_empty() { (0.0, 1.0) } else { (low, high) };
    let margin = (0.14 * (high - low)).max(if log { 0.3 } else { 0.02 * high.abs() }).max(1e-9);
    let label = |size: u32| (FONT, size).into_font().color(&INK);
    let mut chart = ChartBuilder::on(area)
        .caption(title, label(17))
        .margin(12)
        .margin_right(20)
        .x_label_area_size(44)
        .y_label_area_size(58)
        .build_cartesian_2d(0.0..right.max(1.0), (low - margin)..(high + margin))
        .map_err(failed)?;
    chart
        .configure_mesh()
        .light_line_style(WHITE)
        .bold_line_style(FAINT)
        .axis_style(INK)
        .x_labels(6)
        .y_labels(7)
        .x_desc("resident bytes a token")
        .label_style(label(14))
        .axis_desc_style(label(15))
        .x_label_formatter(&|x| crate::text::thousands(*x as u64))
        .y_label_formatter(&|y| if log { power(*y) } else { short(*y) })
        .draw()
        .map_err(failed)?;
    chart.draw_series(points.iter().map(|p| Circle::new((p.0, p.1), 5, p.3.filled()))).map_err(failed)?;
    chart
        .draw_series(points.iter().map(|p| {
            EmptyElement::at((p.0, p.1)) + Text::new(p.2.to_string(), (9, -7), (FONT, 15).into_font().color(&p.3))
        }))
        .map_err(failed)?;
    Ok(())
}

/// A power of ten, or what lies between two.
fn power(exponent: f64) -> String {
    let value = 10f64.powf(exponent);
    if value >= 0.0009 { format!("{}", (value * 1e4).round() / 1e4) } else { format!("{value:.0e}") }
}

fn short(value: f64) -> String {
    match value.abs() {
        v if v >= 100.0 => format!("{value:.0}"),
        v if v >= 10.0 => format!("{value:.1}"),
        v if v >= 1.0 => format!("{value:.2}"),
        _ => format!("{value:.3}"),
    }
}
