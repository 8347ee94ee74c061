// Trajectories as points over two of their columns; a click opens the nearest. On a canvas, as there may be many thousands.
import { useEffect, useRef, useState } from "preact/hooks";
import { extent } from "../data/select";
import type { GrowingTable } from "../data/table";
import { setQuery } from "../route";
import { number, plural } from "../ui/format";
import { useWidth } from "../ui/hooks";
import { colour, watchTheme } from "../ui/theme";

const HEIGHT = 240; // CSS pixels
const EDGE = { left: 52, right: 12, top: 10, bottom: 26 };
const NEAR = 14; // CSS pixels within which a point is meant

interface Properties {
  table: GrowingTable;
  rows: number[];
  query: URLSearchParams;
  onOpen: (row: number) => void;
}

export function Scatter({ table, rows, query, onOpen }: Properties) {
  const [box, width] = useWidth<HTMLDivElement>();
  const canvas = useRef<HTMLCanvasElement>(null);
  const [over, setOver] = useState<number | null>(null);
  const [x, y] = [query.get("x") ?? "seq", query.get("y") ?? "reward"];
  const place = places(table, rows, x, y, width);
  useEffect(() => {
    const draw = () => canvas.current && width > 0 && drawPoints(canvas.current, table, rows, place, over);
    draw();
    return watchTheme(draw);
  });
  const nearest = (event: MouseEvent): number | null => {
    const bounds = canvas.current!.getBoundingClientRect();
    const [px, py] = [event.clientX - bounds.left, event.clientY - bounds.top];
    let [best, distance] = [null as number | null, NEAR ** 2];
    for (const row of rows) {
      const at = place.of(row);
      const away = at ? (at[0] - px) ** 2 + (at[1] - py) ** 2 : Infinity;
      if (away < distance) [best, distance] = [row, away];
    }
    return best;
  };
  const numeric = [...table.columns.keys()].filter((name) => table.column(name).some((value) => typeof value === "number"));
  return (
    <figure class="scatter" ref={box}>
      <div class="scatter-bar">
        <Axis name="x" value={x} options={numeric} />
        <Axis name="y" value={y} options={numeric} />
        <span class="muted" role="status">
          {over === null ? "A click opens the trajectory." : `#${table.text("seq", over)}: ${x} ${number(table.number(x, over))}, ${y} ${number(table.number(y, over))}`}
        </span>
      </div>
      <canvas
        ref={canvas}
        role="img"
        aria-label={`${y} over ${x} of ${plural(rows.length, "trajectory", "trajectories")}; the table below has the same`}
        onMouseMove={(event) => setOver(nearest(event))}
        onMouseLeave={() => setOver(null)}
        onClick={(event) => {
          const row = nearest(event);
          if (row !== null) onOpen(row);
        }}
        style={{ height: `${HEIGHT}px`, cursor: over === null ? "default" : "pointer" }}
      />
    </figure>
  );
}

function Axis(properties: { name: string; value: string; options: string[] }) {
  return (
    <label>
      {properties.name}{" "}
      <select value={properties.value} onChange={(event) => setQuery({ [properties.name]: event.currentTarget.value })}>
        {properties.options.map((option) => (
          <option key={option} value={option}>
            {option === "seq" ? "order (#)" : option.replace("_", " ")}
          </option>
        ))}
      </select>
    </label>
  );
}

interface Places {
  xs: [number, number];
  ys: [number, number];
  width: number;
  of: (row: number) => [number, number] | null;
}

function places(table: GrowingTable, rows: number[], x: string, y: string, width: number): Places {
  const [across, up] = [table.column(x), table.column(y)];
  const xs = padded(extent(rows.map((row) => across[row] ?? null)));
  const ys = padded(extent(rows.map((row) => up[row] ?? null)));
  const [wide, high] = [width - EDGE.left - EDGE.right, HEIGHT - EDGE.top - EDGE.bottom];
  const of = (row: number): [number, number] | null => {
    const [a, b] = [across[row], up[row]];
    if (typeof a !== "number" || typeof b !== "number") return null;
    return [EDGE.left + ((a - xs[0]) / (xs[1] - xs[0])) * wide, EDGE.top + (1 - (b - ys[0]) / (ys[1] - ys[0])) * high];
  };
  return { xs, ys, width, of };
}

function padded([low, high]: [number, number]): [number, number] {
  const pad = (high - low || 1) * 0.04;
  return [low - pad, high + pad];
}

function drawPoints(canvas: HTMLCanvasElement, table: GrowingTable, rows: number[], place: Places, over: number | null): void {
  const scale = Math.min(2, devicePixelRatio || 1);
  canvas.width = place.width * scale;
  canvas.height = HEIGHT * scale;
  canvas.style.width = `${place.width}px`;
  const context = canvas.getContext("2d")!;
  context.scale(scale, scale);
  drawAxes(context, place);
  const bad = new Set(["failed", "timed_out", "cancelled"]);
  const colours = { good: `${colour("series-1")}88`, bad: `${colour("bad")}cc` };
  const size = rows.length > 3000 ? 2 : 3;
  for (const row of rows) {
    const at = place.of(row);
    if (!at) continue;
    context.fillStyle = bad.has(table.text("status", row)) ? colours.bad : colours.good;
    context.beginPath();
    context.arc(at[0], at[1], size, 0, 7);
    context.fill();
  }
  const marked = over === null ? null : place.of(over);
  if (marked) {
    context.strokeStyle = colour("text");
    context.lineWidth = 1.5;
    context.beginPath();
    context.arc(marked[0], marked[1], 6, 0, 7);
    context.stroke();
  }
}

function drawAxes(context: CanvasRenderingContext2D, { xs, ys, width }: Places): void {
  context.font = "11px system-ui, sans-serif";
  context.fillStyle = colour("muted");
  context.strokeStyle = colour("grid");
  for (const tick of ticks(ys)) {
    const y = EDGE.top + (1 - (tick - ys[0]) / (ys[1] - ys[0])) * (HEIGHT - EDGE.top - EDGE.bottom);
    context.beginPath();
    context.moveTo(EDGE.left, y);
    context.lineTo(width - EDGE.right, y);
    context.stroke();
    context.textAlign = "right";
    context.fillText(number(tick), EDGE.left - 8, y + 4);
  }
  context.textAlign = "center";
  for (const tick of ticks(xs)) {
    const x = EDGE.left + ((tick - xs[0]) / (xs[1] - xs[0])) * (width - EDGE.left - EDGE.right);
    context.fillText(number(tick), x, HEIGHT - 8);
  }
}

/** Round numbers within a range, about five of them. */
function ticks([low, high]: [number, number]): number[] {
  const rough = (high - low) / 5;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((size) => size >= rough)!;
  const out: number[] = [];
  for (let tick = Math.ceil(low / step) * step; tick <= high; tick += step) out.push(Math.round(tick / step) * step || 0);
  return out;
}
