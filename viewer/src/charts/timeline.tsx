// Lanes of work, one a process, that can be zoomed: by wheel, by buttons, by keys; dragging moves along.
import { useEffect, useRef, useState } from "preact/hooks";
import { isBundle, read, runPath } from "../data/client";
import type { Lane, Timeline } from "../data/types";
import { clock, seconds } from "../ui/format";
import { useLoad, useWidth } from "../ui/hooks";
import { Loading, Notice } from "../ui/parts";
import { colour, watchTheme } from "../ui/theme";

const LANE = 26; // CSS pixels
const NAMES = 130;
const FOOT = 22;
const HUES = [1, 2, 3, 4, 5, 6, 7, 8];

export function TimelineView({ run }: { run: string }) {
  const [window_, setWindow] = useState<[number, number] | null>(null);
  const asked = useSettled(window_);
  const { value, error } = useLoad((signal) => read<Timeline>(`${runPath(run)}/timeline.json`, { from: asked?.[0], to: asked?.[1] }, signal), [run, isBundle() ? null : asked?.join()], false);
  const whole = useRef<[number, number] | null>(null);
  if (value && !asked && value.to > value.from) whole.current = [value.from, value.to];
  if (error) return <Notice>The timeline cannot be shown: {error.message}</Notice>;
  if (!value) return <Loading what="the timeline" />;
  if (!value.lanes.some((lane) => lane.spans.length)) return <Notice>No process has written down its work yet.</Notice>;
  const shown = window_ ?? whole.current ?? [value.from, value.to];
  return <Lanes lanes={value.lanes} shown={shown} whole={whole.current ?? shown} onShow={setWindow} />;
}

/** The value once it has rested, so that a zoom asks once. */
function useSettled<T>(value: T): T {
  const [settled, setSettled] = useState(value);
  useEffect(() => {
    const timer = setTimeout(() => setSettled(value), 200);
    return () => clearTimeout(timer);
  }, [value]);
  return settled;
}

interface LanesProperties {
  lanes: Lane[];
  shown: [number, number];
  whole: [number, number];
  onShow: (shown: [number, number] | null) => void;
}

function Lanes({ lanes, shown, whole, onShow }: LanesProperties) {
  const [box, width] = useWidth<HTMLDivElement>();
  const canvas = useRef<HTMLCanvasElement>(null);
  const [over, setOver] = useState("");
  const height = lanes.length * LANE + FOOT;
  const drag = useRef<number | null>(null);
  useEffect(() => {
    const draw = () => canvas.current && width > 0 && drawLanes(canvas.current, width, height, lanes, shown);
    draw();
    return watchTheme(draw);
  });
  const time = (event: MouseEvent) => shown[0] + ((event.offsetX - NAMES) / (width - NAMES)) * (shown[1] - shown[0]);
  const zoom = (factor: number, centre = (shown[0] + shown[1]) / 2) => {
    const span = Math.max(1e-3, Math.min(whole[1] - whole[0], (shown[1] - shown[0]) * factor));
    const share = (centre - shown[0]) / (shown[1] - shown[0]);
    const from = Math.max(whole[0], Math.min(whole[1] - span, centre - share * span));
    onShow(span >= whole[1] - whole[0] ? null : [from, from + span]);
  };
  const move = (by: number) => {
    const span = shown[1] - shown[0];
    const from = Math.max(whole[0], Math.min(whole[1] - span, shown[0] + by * span));
    onShow([from, from + span]);
  };
  const keys: Record<string, () => void> = { "+": () => zoom(0.5), "=": () => zoom(0.5), "-": () => zoom(2), ArrowLeft: () => move(-0.25), ArrowRight: () => move(0.25), "0": () => onShow(null) };
  return (
    <div class="timeline" ref={box}>
      <div class="timeline-bar">
        <button type="button" onClick={() => zoom(0.5)} aria-label="Zoom in">
          +
        </button>
        <button type="button" onClick={() => zoom(2)} aria-label="Zoom out">
          −
        </button>
        <button type="button" onClick={() => move(-0.5)} aria-label="Earlier">
          ←
        </button>
        <button type="button" onClick={() => move(0.5)} aria-label="Later">
          →
        </button>
        <button type="button" onClick={() => onShow(null)}>
          All
        </button>
        <span class="muted" role="status">
          {over || `${clock(shown[0])} to ${clock(shown[1])} (${seconds(shown[1] - shown[0])})`}
        </span>
      </div>
      <canvas
        ref={canvas}
        tabIndex={0}
        data-keys="own"
        role="img"
        aria-label={`Timeline of ${lanes.map((lane) => lane.name).join(", ")}. Keys: plus, minus, arrows, 0 for all.`}
        style={{ height: `${height}px` }}
        onKeyDown={(event) => {
          const action = keys[event.key];
          if (action) (event.preventDefault(), action());
        }}
        onWheel={(event) => {
          if (!event.ctrlKey && !event.shiftKey) return;
          event.preventDefault();
          zoom(event.deltaY > 0 ? 1.25 : 0.8, time(event));
        }}
        onPointerDown={(event) => (drag.current = time(event))}
        onPointerUp={() => (drag.current = null)}
        onPointerMove={(event) => {
          if (drag.current !== null && event.buttons) {
            const by = drag.current - time(event);
            return move(by / (shown[1] - shown[0]));
          }
          setOver(found(lanes, Math.floor(event.offsetY / LANE), time(event), (shown[1] - shown[0]) / width));
        }}
        onPointerLeave={() => setOver("")}
      />
      <p class="muted hint">
        {kindColours(lanes).map(([name, hue]) => (
          <span key={name} class="key">
            <span class="swatch" style={{ background: `var(--${hue})` }} aria-hidden="true" /> {name}
          </span>
        ))}
        Ctrl and wheel zooms; dragging moves.
      </p>
    </div>
  );
}

function found(lanes: Lane[], index: number, time: number, pixel: number): string {
  const lane = lanes[index];
  const span = lane?.spans.find(([start, duration]) => time >= start - pixel && time <= start + duration + pixel);
  return lane && span ? `${lane.name}: ${span[2]}, ${seconds(span[1])} from ${clock(span[0])}` : "";
}

/** The kind of a span's work: evaluations are one kind, whatever they evaluate. */
function kindOf(name: string): string {
  return name.split(" of ", 1)[0]!;
}

/** A colour for each kind of work, by its custom property, in the alphabet's order: as few as can be share one within a lane. */
function kindColours(lanes: Lane[]): [string, string][] {
  const together = lanes.map((lane) => new Set(lane.spans.map((span) => kindOf(span[2]))));
  const chosen = new Map<string, number>();
  for (const kind of [...new Set(together.flatMap((kinds) => [...kinds]))].sort()) {
    const near = new Set(together.filter((kinds) => kinds.has(kind)).flatMap((kinds) => [...kinds]));
    const used = HUES.map((hue) => [...chosen].reduce((sum, [other, its]) => sum + (its === hue ? (near.has(other) ? 100 : 1) : 0), 0));
    chosen.set(kind, HUES[used.indexOf(Math.min(...used))]!);
  }
  return [...chosen].map(([kind, hue]) => [kind, `series-${hue}`]);
}

function drawLanes(canvas: HTMLCanvasElement, width: number, height: number, lanes: Lane[], [from, to]: [number, number]): void {
  const scale = Math.min(2, devicePixelRatio || 1);
  canvas.width = width * scale;
  canvas.height = height * scale;
  canvas.style.width = `${width}px`;
  const context = canvas.getContext("2d")!;
  context.scale(scale, scale);
  context.font = "12px system-ui, sans-serif";
  const colours = new Map(kindColours(lanes).map(([kind, hue]) => [kind, colour(hue)]));
  const place = (time: number) => NAMES + ((time - from) / (to - from)) * (width - NAMES);
  lanes.forEach((lane, index) => {
    const top = index * LANE;
    context.fillStyle = colour("text");
    context.fillText(lane.name.slice(0, 20), 0, top + 17);
    context.fillStyle = colour("raised");
    context.fillRect(NAMES, top + 3, width - NAMES, LANE - 6);
    for (const [start, duration, name] of lane.spans) {
      if (start + duration < from || start > to) continue;
      const [left, right] = [Math.max(NAMES, place(start)), Math.min(width, place(start + duration))];
      context.fillStyle = colours.get(kindOf(name))!;
      context.fillRect(left, top + 4, Math.max(1, right - left), LANE - 8);
      if (right - left > 60) {
        context.fillStyle = colour("on-series");
        context.fillText(name, left + 5, top + 17, right - left - 8);
      }
    }
  });
  context.fillStyle = colour("muted");
  const ticks = Math.max(1, Math.min(4, Math.floor((width - NAMES) / 90)));
  for (let tick = 0; tick <= ticks; tick++) {
    const time = from + (tick / ticks) * (to - from);
    context.textAlign = tick === 0 ? "left" : tick === ticks ? "right" : "center";
    context.fillText(clock(time), place(time), height - 6);
  }
}
