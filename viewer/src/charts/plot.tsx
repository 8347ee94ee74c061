// One chart: uPlot in a box that follows its width and the page's colours; the newest values stand beside it in words.
import { useEffect, useRef } from "preact/hooks";
import uPlot from "uplot";
import "uplot/dist/uPlot.min.css";
import type { Num } from "../data/types";
import { number } from "../ui/format";
import { useWidth } from "../ui/hooks";
import { colour, watchTheme } from "../ui/theme";

export interface Series {
  name: string;
  values: Num[];
  /** Custom property of the colour, as "series-1". */
  colour: string;
  kind?: "line" | "faint" | "points" | "bars";
  /** Half widths of intervals around the values. */
  around?: Num[];
  /** Index of the series that this one fills the area down to. */
  fillTo?: number;
  /** What legend and pointer tell in place of `values`, where these are sums of several series. */
  told?: Num[];
  /** Left out of the legend. */
  quiet?: boolean;
}

interface Properties {
  label: string;
  x: number[];
  series: Series[];
  height?: number;
  /** Range of y that is always shown. */
  floor?: number;
  ceiling?: number;
  xName?: string;
}

export function Plot(properties: Properties) {
  const { label, series, height = 200 } = properties;
  const [box, width] = useWidth<HTMLDivElement>();
  const chart = useRef<uPlot | null>(null);
  const shape = JSON.stringify([series.map(({ name, kind, colour: hue, fillTo }) => [name, kind, hue, fillTo]), height, properties.floor, properties.ceiling]);
  const latest = useRef(series);
  latest.current = series;
  const data = [properties.x, ...series.map((one) => one.values)] as uPlot.AlignedData;
  useEffect(() => {
    if (!width || !box.current) return;
    const make = () => {
      chart.current?.destroy();
      chart.current = new uPlot(options(properties, width, latest), data, box.current!);
    };
    make();
    const unwatch = watchTheme(make);
    return () => (unwatch(), chart.current?.destroy(), (chart.current = null));
  }, [shape, width > 0]);
  useEffect(() => {
    if (width) chart.current?.setSize({ width, height });
  }, [width, height]);
  useEffect(() => {
    chart.current?.setData(data);
  });
  const shown = series.filter((one) => !one.quiet);
  return (
    <figure class="plot">
      <div ref={box} role="img" aria-label={`${label}: ${shown.map((one) => `${one.name} ${number(lastOf(one.told ?? one.values))}`).join(", ")}`} style={{ height: `${height}px` }} />
      <figcaption>
        {shown.map((one) => (
          <span key={one.name} class="key">
            <span class="swatch" style={{ background: `var(--${one.colour})` }} aria-hidden="true" />
            {one.name} <b>{number(lastOf(one.told ?? one.values))}</b>
          </span>
        ))}
      </figcaption>
    </figure>
  );
}

function lastOf(values: Num[]): Num {
  for (let at = values.length - 1; at >= 0; at--) if (values[at] !== null && values[at] !== undefined) return values[at]!;
  return null;
}

function options(properties: Properties, width: number, latest: { current: Series[] }): uPlot.Options {
  const axis: uPlot.Axis = {
    stroke: colour("muted"),
    grid: { stroke: colour("grid"), width: 1 },
    ticks: { show: false },
    font: "11px system-ui, sans-serif",
  };
  const { floor, ceiling } = properties;
  return {
    width,
    height: properties.height ?? 200,
    legend: { show: false },
    cursor: { points: { size: 6 }, drag: { x: true, y: false } },
    scales: {
      x: { time: false },
      y: { range: (_plot, low, high) => spread(Math.min(low ?? floor ?? 0, floor ?? Infinity), Math.max(high ?? ceiling ?? 1, ceiling ?? -Infinity)) },
    },
    axes: [
      { ...axis, size: 26, values: (_plot, ticks) => ticks.map((tick) => (Number.isInteger(tick) ? String(tick) : "")) },
      { ...axis, size: 48, values: (_plot, ticks) => ticks.map((tick) => number(tick)) },
    ],
    series: [{ label: properties.xName ?? "step" }, ...properties.series.map(uplotSeries)],
    bands: properties.series.flatMap((one, index) => (one.fillTo === undefined ? [] : [{ series: [index + 1, one.fillTo + 1] as uPlot.Band.Bounds, fill: tint(one.colour) }])),
    hooks: { draw: [(plot) => drawIntervals(plot, latest.current)] },
    plugins: [tooltip(properties.xName ?? "step", latest)],
  };
}

function spread(low: number, high: number): [number, number] {
  if (high > low) return [low, high + (high - low) * 0.05];
  return [low - Math.max(0.5, Math.abs(low) * 0.1), high + Math.max(0.5, Math.abs(high) * 0.1)];
}

function tint(name: string): string {
  return `${colour(name)}40`;
}

function uplotSeries(one: Series): uPlot.Series {
  const stroke = colour(one.colour);
  if (one.kind === "points") return { label: one.name, stroke, width: 0, paths: () => null, points: { show: true, size: 7, fill: stroke } };
  if (one.kind === "bars") return { label: one.name, stroke, fill: stroke, width: 0, paths: uPlot.paths.bars!({ size: [1, 40] }), points: { show: false } };
  const faint = one.kind === "faint";
  return { label: one.name, stroke: faint ? `${stroke}55` : stroke, width: faint ? 1 : 1.75, spanGaps: true, points: { show: few(one.values), size: 5, fill: stroke } };
}

/** Values that no line joins are drawn as points. */
function few(values: Num[]): boolean {
  return values.filter((value) => value !== null && value !== undefined).length < 3;
}

function drawIntervals(plot: uPlot, series: Series[]): void {
  const { ctx: context } = plot;
  series.forEach((one) => {
    if (!one.around) return;
    context.save();
    context.strokeStyle = colour(one.colour);
    context.lineWidth = 1.5 * devicePixelRatio;
    context.beginPath();
    one.values.forEach((value, index) => {
      const half = one.around![index];
      if (value === null || value === undefined || !half) return;
      const x = plot.valToPos(plot.data[0][index]!, "x", true);
      context.moveTo(x, plot.valToPos(value - half, "y", true));
      context.lineTo(x, plot.valToPos(value + half, "y", true));
    });
    context.stroke();
    context.restore();
  });
}

/** Values at the pointer, beside it. */
function tooltip(xName: string, latest: { current: Series[] }): uPlot.Plugin {
  const box = document.createElement("div");
  box.className = "plot-tip";
  box.hidden = true;
  return {
    hooks: {
      init: (plot) => void plot.over.append(box),
      setCursor: (plot) => {
        const { idx, left = -1 } = plot.cursor;
        box.hidden = idx === null || idx === undefined || left < 0;
        if (box.hidden) return;
        box.replaceChildren(line(xName, number(plot.data[0][idx!] ?? null)));
        latest.current.forEach((one, index) => {
          const value = one.told ? one.told[idx!] : plot.data[index + 1]?.[idx!];
          if (one.quiet || value === null || value === undefined) return;
          const half = one.around?.[idx!];
          box.append(line(one.name, number(value) + (half ? ` ± ${number(half)}` : "")));
        });
        box.style.left = left > plot.over.clientWidth / 2 ? "" : `${left + 12}px`;
        box.style.right = left > plot.over.clientWidth / 2 ? `${plot.over.clientWidth - left + 12}px` : "";
      },
    },
  };
}

function line(name: string, value: string): HTMLElement {
  const element = document.createElement("div");
  const strong = document.createElement("b");
  strong.textContent = value;
  element.append(`${name} `, strong);
  return element;
}
